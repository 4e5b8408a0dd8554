-- Spends from a token bucket, or looks at it. ARGV from the third: "take", "look" or "settle" (spends nothing), bucket, scale in ms, limit, burst,
-- and in nanoseconds the cost, the burst and how far ahead it may be booked; and after Redis was away what the caller
-- knows: the birth of the key it has heard of, when as far as heard the bucket is full again, and when it is as far as
-- the caller spent from it meanwhile, both in seconds and nanoseconds, since when it did so, in microseconds, and the cost
-- of that in nanoseconds. Of all that nothing is taken over that was before a reset. The state is the moment at which the bucket is full again, and by how many
-- milliseconds it was ever booked ahead: further ahead a clock was set back, and the bucket is just exhausted.
-- Answers whether the cost was free, the time, that moment in seconds and nanoseconds, the milliseconds, birth, and
-- whether that was a reset.
local scale, rate, burst = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local need, tolerance, ahead = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local s, changed = current(ARGV[4], 'token_bucket', scale, rate, burst)
local debt = debt_of(s)
if debt > 2 * tolerance + s.z * 1e6 then
  debt, changed = tolerance, true
end

local function booked(ns)
  if ns > tolerance then
    s.z = math.max(s.z, math.floor((ns - tolerance) / 1e6) + 1)
  end
end

if ARGV[11] then
  local known = debt
  local born = tonumber(ARGV[11])
  local unheard = was_reset(s) and born < s.born
  if unheard then -- What it spent counts, the rest of its level is of before.
    if tonumber(ARGV[16]) >= s.born then known = math.max(debt, 0) + tonumber(ARGV[17]) end
  elseif s.born ~= born then -- the key was lost. Several callers bring what they heard; the most of it counts, once.
    local heard = tonumber(ARGV[12]) * 1e6 + math.floor(tonumber(ARGV[13]) / 1e3)
    local from = math.max(s.restored, now_us)
    if heard > from then
      known, s.restored = math.max(debt, 0) + (heard - from) * 1e3, heard
    end
  end
  if not unheard then
    known = math.max(known, (tonumber(ARGV[14]) - now_s) * 1e9 + tonumber(ARGV[15]) - now_ns)
  end
  if known > debt then
    debt, changed = known, true
    booked(debt)
  end
end

local next = math.max(debt, 0) + need
local free = next <= tolerance + ahead
if ARGV[3] == 'take' and free then
  debt, changed = next, true
  booked(next)
end
if changed then
  set_debt(s, debt)
  if ARGV[3] ~= 'look' then save(s) end
end
return {free and 1 or 0, now_s, now_ns, s.x, s.y, s.z, s.born, was_reset(s) and 1 or 0}
