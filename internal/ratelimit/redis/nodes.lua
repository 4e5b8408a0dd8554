-- Keeps the list of the nodes that count here. KEYS[1] is the list, ARGV the node and for how many milliseconds it
-- stays on the list; 0 takes it off. Answers the time, as seconds and nanoseconds, and how many there are.
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now))
if tonumber(ARGV[2]) > 0 then
  redis.call('ZADD', KEYS[1], string.format('%.0f', now + ARGV[2]), ARGV[1])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
else
  redis.call('ZREM', KEYS[1], ARGV[1])
end
return {tonumber(t[1]), tonumber(t[2]) * 1000, redis.call('ZCARD', KEYS[1])}
