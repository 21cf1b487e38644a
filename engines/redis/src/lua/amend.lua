-- amend.lua: changes what a held claim weighs, or what it says; its token stays.
-- KEYS: the key, the state.  ARGV: id, count, then "ask" with weight (0: the whole
-- line) and capacity, or "value" with the new value.
-- Answers "done" | "busy" | "gone".

local now = clock()
local line = open(KEYS[1], KEYS[2])
settle(line, now)

local function amend(claim)
  if ARGV[3] == 'value' then
    if claim.token ~= tonumber(ARGV[2]) then return 'gone' end
    claim.rest = string.match(claim.rest, '^[^\n]*') .. '\n' .. ARGV[4]
    store(line, claim)
    return 'done'
  end
  if claim.token == 0 or claim.token ~= tonumber(ARGV[2]) then return 'gone' end
  local weight, capacity = tonumber(ARGV[4]), tonumber(ARGV[5])
  local lighter = claim.weight == 0 or (weight > 0 and weight <= claim.weight)
  local alone = line.whole or redis.call('ZCARD', line.state .. ':shares') == 1
  local others = line.parts - (claim.weight > 0 and 1 or 0)
  if (not lighter and not alone) or (weight > 0 and others > 0 and capacity ~= line.capacity) then
    return 'busy'
  end
  local ends = ends_at(line, claim, now)
  count_part(line, claim, -1)
  if claim.weight > 0 then
    redis.call('ZREM', line.state .. ':shares', claim.id)
    line.taken = line.taken - claim.weight
  end
  claim.weight, claim.capacity = weight, capacity
  count_part(line, claim, 1)
  if weight > 0 then
    redis.call('ZADD', line.state .. ':shares', text(ends), claim.id)
    line.taken, line.whole = line.taken + weight, false
    arm(line)
  else
    redis.call('SET', line.key, claim.id, 'PXAT', millis(ends))
    redis.call('HDEL', line.state .. ':claims', claim.id)
    line.value, line.whole, line.taken = claim.id, true, 0
  end
  store(line, claim)
  advance(line, now)
  return 'done'
end

local claim = record(line, ARGV[1])
return finish(line, claim and amend(claim) or 'gone')
