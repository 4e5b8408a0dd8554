-- Spends from a fixed or a sliding window, or looks at it. ARGV from the third: "take", "look" or "settle" (spends nothing), bucket, scale in ms,
-- limit, cost; and after Redis was away what the caller knows: the birth of the key it has heard of, window, count and
-- previous count as heard, window, count and previous count of what it admitted meanwhile, and since when, in
-- microseconds. Of that nothing is taken over that was before a reset.
-- Answers whether the cost was free, the time, window, count, previous count, birth, and whether that was a reset.
local scale, limit, cost = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local s, changed = current(ARGV[4], ALGORITHM, scale, 0, 0)
local index, into = window(scale)
local ahead = s.x - index
if ahead == 1 then -- this clock is behind: a window never moves back
  into = 0
elseif ahead > 1 then -- it was set back: the count goes on
  s.x, changed = index, true
elseif ahead == -1 then
  s.x, s.y, s.z, s.restored = index, 0, s.y, 0
elseif ahead < -1 then
  s.x, s.y, s.z, s.restored = index, 0, 0, 0
end

if ARGV[8] then
  local heard_x, heard_y, heard_z = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
  local born = tonumber(ARGV[8])
  local unheard = was_reset(s) and born < s.born
  if s.born ~= born and not unheard then -- the key was lost. Several callers bring what they heard; the most of it counts, once.
    if heard_x == s.x then
      if heard_y > s.restored then
        s.y, s.restored = s.y + heard_y - s.restored, heard_y
      end
      s.z = math.max(s.z, heard_z)
    elseif heard_x == s.x - 1 then
      s.z = math.max(s.z, heard_y)
    end
    changed = true
  end
  local owed_x, owed_y, owed_z = tonumber(ARGV[12]), tonumber(ARGV[13]), tonumber(ARGV[14])
  if unheard and tonumber(ARGV[15]) < s.born then
    owed_y, owed_z = 0, 0
  elseif owed_x == s.x then
    s.y, s.z = s.y + owed_y, s.z + owed_z
  elseif owed_x == s.x - 1 then
    s.z = s.z + owed_y
  end
  changed = changed or owed_y + owed_z > 0
end

local carried = 0
if ALGORITHM == 'sliding_window' then
  carried = muldiv(math.min(s.z, limit), scale - into - 1, scale)
end
local free = cost <= limit and s.y + carried + cost <= limit
if ARGV[3] == 'take' and free then
  s.y, changed = s.y + cost, true
end
if changed and ARGV[3] ~= 'look' then save(s) end
return {free and 1 or 0, now_s, now_ns, s.x, s.y, s.z, s.born, was_reset(s) and 1 or 0}
