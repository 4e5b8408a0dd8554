-- Forgets what was spent, in the unit in which the state is kept. ARGV from the third: for how many milliseconds what was
-- spent could come back, and bucket, algorithm, scale and rate of a state, should there be none. The key has a new birth: what
-- nodes bring of before it is not taken over.
local life = tonumber(ARGV[3])
local s = load()
if s then
  life = math.max(life, lasts(s))
else
  s = {bucket = ARGV[4], algorithm = ARGV[5], scale = tonumber(ARGV[6]), rate = tonumber(ARGV[7]), born = 0}
end
if s.algorithm == 'token_bucket' then
  s.x, s.y, s.z = now_s, now_ns, 0
else
  s.x, s.y, s.z = window(s.scale), 0, 0
end
s.born, s.restored, s.reset = math.max(now_us, s.born + 1), 0, now_us + life * 1e3
save(s)
return {1}
