-- Shared by all scripts that touch a budget. KEYS[1] is the budget. ARGV[1] and ARGV[2] are the time in seconds and
-- nanoseconds, both empty for the server's own; only tests pass it in. All numbers are whole and below 2^53, where
-- Lua's doubles are exact.
local now_s, now_ns = tonumber(ARGV[1]), tonumber(ARGV[2])
local test = now_s ~= nil
if not test then
  local t = redis.call('TIME')
  now_s, now_ns = tonumber(t[1]), tonumber(t[2]) * 1000
end
local now_ms = now_s * 1000 + math.floor(now_ns / 1e6)
local now_us = now_s * 1e6 + math.floor(now_ns / 1e3)

-- The quotient and the remainder of a*b by c, exact for a < 2^53, b < 2^31, c < 2^47: bit by bit where a*b is not.
local function muldiv(a, b, c)
  if a * b < 2 ^ 53 then
    local r = a * b % c
    return (a * b - r) / c, r
  end
  local ra = a % c
  local qa = (a - ra) / c
  local q, r = 0, 0
  for bit = 30, 0, -1 do
    q, r = q * 2, r * 2
    if b >= 2 ^ bit then
      b = b - 2 ^ bit
      q, r = q + qa, r + ra
    end
    local rest = r % c
    q, r = q + (r - rest) / c, rest
  end
  return q, r
end

local function window(scale)
  local into = now_ms % scale
  return (now_ms - into) / scale, into
end

-- The time in nanoseconds until a token bucket is full.
local function debt_of(s)
  return (s.x - now_s) * 1e9 + s.y - now_ns
end

local function set_debt(s, debt)
  local ns = now_ns + debt
  s.y = ns % 1e9
  s.x = now_s + (ns - s.y) / 1e9
end

-- The value is documented in docs/redis.md; Go never reads it.
local function load()
  local v = redis.call('GET', KEYS[1])
  if not v then return nil end
  local algorithm, scale, rate, x, y, z, born, restored, reset =
    string.match(v, '^%S+ (%S+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) ?(%d*)$')
  if not algorithm then return nil end
  return {
    bucket = string.match(v, '^%S+'), algorithm = algorithm, scale = tonumber(scale), rate = tonumber(rate),
    x = tonumber(x), y = tonumber(y), z = tonumber(z), born = tonumber(born), restored = tonumber(restored),
    reset = tonumber(reset) or 0,
  }
end

-- How many milliseconds a state matters.
local function lasts(s)
  if s.algorithm == 'token_bucket' then return math.ceil(debt_of(s) / 1e6) end
  local windows = s.algorithm == 'sliding_window' and 2 or 1
  return (s.x + windows) * s.scale - now_ms
end

-- Whether a state began by a reset, and nodes may still know of what was spent before.
local function was_reset(s)
  return s.reset > now_us
end

-- Value and lifetime are set in one: a key lives until there is nothing left to remember.
local function save(s)
  local ms, value = lasts(s), string.format('%s %s %.0f %.0f %.0f %.0f %.0f %.0f %.0f',
    s.bucket, s.algorithm, s.scale, s.rate, s.x, s.y, s.z, s.born, s.restored)
  if was_reset(s) then
    ms = math.max(ms, math.ceil((s.reset - now_us) / 1e3))
    value = value .. string.format(' %.0f', s.reset)
  end
  if ms <= 0 then
    redis.call('DEL', KEYS[1])
    return
  end
  if test then ms = 3600000 end -- the time of a test has nothing to do with the server's
  redis.call('SET', KEYS[1], value, 'PX', string.format('%.0f', ms))
end

-- The present use of a state under the shape in which it was kept.
local function use(s)
  if s.algorithm == 'token_bucket' then
    local debt = debt_of(s)
    if debt <= 0 then return 0 end
    local q, r = muldiv(debt, s.rate, s.scale * 1e6)
    if r > 0 then q = q + 1 end
    return math.min(q, 1e9)
  end
  local index, into = window(s.scale)
  local ahead, carried = s.x - index, 0
  if ahead > 0 then into = 0 end
  if s.algorithm == 'sliding_window' and ahead >= -1 then
    carried = muldiv(ahead >= 0 and s.z or s.y, s.scale - into - 1, s.scale)
  end
  return (ahead >= 0 and s.y or 0) + carried
end

-- The state in the shape of the present policy, and whether it had to be turned into it: then it starts from the
-- present use, of a token bucket at most a full one.
local function current(bucket, algorithm, scale, rate, burst)
  local s = load()
  if s and s.algorithm == algorithm and s.scale == scale and s.rate == rate then
    s.bucket = bucket
    return s, false
  end
  local used = s and use(s) or 0
  local fresh = {
    bucket = bucket, algorithm = algorithm, scale = scale, rate = rate,
    x = now_s, y = now_ns, z = 0, born = s and s.born or now_us, restored = 0, reset = s and s.reset or 0,
  }
  if algorithm == 'token_bucket' then
    set_debt(fresh, (muldiv(scale * 1e6, math.min(used, burst), rate)))
  else
    fresh.x, fresh.y = window(scale), used
  end
  return fresh, s ~= nil
end
