-- enter.lua: takes a place; grant, token and queueing in one step.
-- KEYS: the key, the hash.  ARGV: id, "weight capacity " (0 0: the whole line), ttl in ms and 2
-- for the rounding, " ttl evicted channel owner[\nvalue]", queue (1 or 0), and, if replicas must
-- have the grant, anything: then an answer is a write, so that WAIT on this connection covers it.
-- Answers "ID busy" | "ID mismatch CAPACITY" | "ID held TOKEN" (new) |
-- "ID PLACE TOKEN LEFT LOOK-AGAIN-IN".

local id, queues = ARGV[1], ARGV[5] == '1'
local now = clock()
local claim = parse(id, ARGV[2] .. '0' .. ARGV[4])
local ends = now + claim.ttl * 1000

local left = redis.call('HGET', KEYS[2], 'left')
if left and tonumber(left) > now then
  local remembered = redis.call('ZSCORE', KEYS[2] .. ':left', id)
  if remembered and tonumber(remembered) > now then return id .. ' busy' end
elseif left then
  redis.call('HDEL', KEYS[2], 'left')
end

local line = open(KEYS[1], KEYS[2])
settle(line, now)

local there = record(line, id)
if there then
  if there.token == 0 and not queues then
    remove(line, there)
    advance(line, now)
    return finish(line, id .. ' busy')
  end
  if ARGV[6] then store(line, there) end
  return finish(line, standing(line, there, now))
end

if claim.weight > 0 and line.parts > 0 and line.capacity ~= claim.capacity then
  return finish(line, id .. ' mismatch ' .. text(line.capacity))
end

if line.waiting == 0 and fits(line, claim) then
  local held, why = hold(line, claim, ends, now)
  if not held then
    finish(line)
    return why
  end
  count_part(line, claim, 1)
  return finish(line, id .. ' held ' .. text(claim.token))
end
if not queues then return finish(line, id .. ' busy') end

local last = redis.call('ZREVRANGE', line.hash .. ':queue', 0, 0, 'WITHSCORES')[2]
redis.call('ZADD', line.hash .. ':queue', text(tonumber(last or '0') + 1), id)
redis.call('ZADD', line.hash .. ':leases', text(ends), id)
store(line, claim)
count_part(line, claim, 1)
line.waiting, changed = line.waiting + 1, true
return finish(line, standing(line, claim, now))
