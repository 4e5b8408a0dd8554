-- Gives back what was spent, in the unit in which the state is kept now. ARGV from the third: when it was spent, in ms,
-- and the cost. Answers whether there was anything to give back to.
local s = load()
if not s then return {0} end
local at, cost = tonumber(ARGV[3]), tonumber(ARGV[4])
if s.algorithm == 'token_bucket' then
  set_debt(s, debt_of(s) - muldiv(s.scale * 1e6, cost, s.rate))
else
  local index = math.floor(at / s.scale)
  if s.x == index then
    s.y = math.max(s.y - cost, 0)
  elseif s.x == index + 1 and s.algorithm == 'sliding_window' then
    s.z = math.max(s.z - cost, 0)
  else
    return {0}
  end
end
save(s)
return {1}
