-- enter.lua: takes a place; grant, token and queueing in one step.
-- KEYS: the key, the state.  ARGV: the id, "weight capacity queue lasts" (0 0: the whole line;
-- queue 1 or 0; ttl in ms and 2 for the rounding), " ttl evicted channel owner[\nvalue]"; then, if
-- replicas must have the grant, anything: the answer is then a write, so that WAIT on this
-- connection covers it.
-- Answers the id, then "busy" | "mismatch CAPACITY" | "held TOKEN" (new)
-- | "PLACE TOKEN LEFT LOOK-AGAIN-IN".

local now = clock()
local id = ARGV[1]

local function enter(line, claim, queues)
  if line.left > now then
    local remembered = redis.call('ZSCORE', line.state .. ':left', id)
    if remembered and tonumber(remembered) > now then return 'busy' end
  elseif line.left > 0 then
    line.left, changed = 0, true
  end
  settle(line, now)

  local there = record(line, id)
  if there then
    if there.token == 0 and not queues then
      remove(line, there)
      advance(line, now)
      return 'busy'
    end
    if ARGV[4] then store(line, there) end
    return standing(line, there, now)
  end

  if claim.weight > 0 and line.parts > 0 and line.capacity ~= claim.capacity then
    return 'mismatch ' .. text(line.capacity)
  end

  local ends = now + claim.ttl * 1000
  if line.waiting == 0 and fits(line, claim) then
    local held, why = hold(line, claim, ends, now)
    if not held then return nil, why end
    count_part(line, claim, 1)
    return 'held ' .. text(claim.token)
  end
  if not queues then return 'busy' end

  local last = redis.call('ZREVRANGE', line.state .. ':queue', 0, 0, 'WITHSCORES')[2]
  redis.call('ZADD', line.state .. ':queue', text(tonumber(last or '0') + 1), id)
  redis.call('ZADD', line.state .. ':leases', text(ends), id)
  store(line, claim)
  count_part(line, claim, 1)
  line.waiting = line.waiting + 1
  return standing(line, claim, now)
end

local ask, queue = string.match(ARGV[2], '^(%d+ %d+ )(%d)')
local line = open(KEYS[1], KEYS[2])
local answer, why = enter(line, parse(id, ask .. '0' .. ARGV[3]), queue == '1')
return finish(line, answer and id .. ' ' .. answer or why)
