-- renew.lua: re-arms many leases in one call. Never re-creates anything.
-- KEYS: the key and the state of each.  ARGV: id and count (0: unknown) of each.
-- Answers the first id, then for each, in order: the ttl in ms | "lost" | "evicted" | "error ..." (not known).

local now = clock()

local function renew(key, state, id, count)
  local line = open(key, state)
  local claim = record(line, id)
  if not claim then return 'lost' end
  local value = redis.pcall('GET', key)
  if type(value) == 'table' then
    -- A key of another type: not ours, so holders are lost; who waits is not told by it.
    return claim.token > 0 and 'lost' or 'error'
  end
  if not (line.whole and line.value == id and value == id) then
    settle(line, now)
    claim = record(line, id)
  end
  local answer = 'lost'
  if claim and (count == 0 or claim.token == count) then
    local ends = now + claim.ttl * 1000
    if claim.evicted then
      answer = 'evicted'
    elseif claim.token == 0 then
      redis.call('ZADD', state .. ':leases', 'XX', text(ends), id)
      answer = text(claim.ttl)
    elseif line.whole then
      -- The key may have ended since it was read, on servers whose clock runs inside a script.
      answer = redis.call('PEXPIREAT', key, millis(ends)) == 1 and text(claim.ttl) or 'lost'
    else
      redis.call('ZADD', state .. ':shares', 'XX', text(ends), id)
      arm(line)
      answer = text(claim.ttl)
    end
  end
  return finish(line, answer)
end

local answers = { ARGV[1] }
for at = 1, #KEYS / 2 do
  local done, answer = pcall(renew, KEYS[2 * at - 1], KEYS[2 * at],
    ARGV[2 * at - 1], tonumber(ARGV[2 * at]))
  changed, granted = false, {}
  answers[at + 1] = done and answer or 'error'
end
return answers
