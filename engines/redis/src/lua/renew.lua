-- renew.lua: re-arms a lease. Never re-creates anything.
-- KEYS: the key, the state.  ARGV: the id and the count (0: unknown).
-- Answers the id, then the ttl in ms | "lost" | "evicted" | "unknown".

local now = clock()
local id, count = ARGV[1], tonumber(ARGV[2])

local function renew(line)
  local claim = record(line, id)
  if not claim then return 'lost' end
  if type(redis.pcall('GET', line.key)) == 'table' then
    -- A key of another type: not ours, so holders are lost; who waits is not told by it.
    return claim.token > 0 and 'lost' or 'unknown'
  end
  settle(line, now)
  claim = record(line, id)
  if not claim or (count ~= 0 and claim.token ~= count) then return 'lost' end
  if claim.evicted then return 'evicted' end
  local ends = now + claim.ttl * 1000
  if claim.token == 0 then
    redis.call('ZADD', line.state .. ':leases', 'XX', text(ends), id)
  elseif line.whole then
    -- The key may have ended since it was read, on servers whose clock runs inside a script.
    if redis.call('PEXPIREAT', line.key, millis(ends)) == 0 then return 'lost' end
  else
    redis.call('ZADD', line.state .. ':shares', 'XX', text(ends), id)
    arm(line)
  end
  remember(line)
  return text(claim.ttl)
end

local line = open(KEYS[1], KEYS[2])
return finish(line, id .. ' ' .. renew(line))
