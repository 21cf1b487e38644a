-- enter.lua: takes a place; grant, token and queueing in one step.
-- KEYS: the key, the hash.  ARGV: changes channel, id, weight (0: the whole line), capacity,
-- ttl in ms, queue (1 or 0), our channel, owner and value, replicated (1: make it a write).
-- Answers {busy} | {mismatch, capacity} | {held or waiting, token, lease left, look again in}.

local changes, id, weight, capacity = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local ttl = tonumber(ARGV[5])
local now = clock()
local ends = now + ttl * 1000
local claim = {
  id = id, weight = weight, capacity = capacity, token = 0, ttl = ttl, evicted = false,
  channel = ARGV[7], rest = ARGV[8],
}

local left = redis.call('HGET', KEYS[2], 'left')
if left and tonumber(left) > now then
  local until_ = redis.call('ZSCORE', KEYS[2] .. ':left', id)
  if until_ and tonumber(until_) > now then return { 'busy' } end
elseif left then
  redis.call('HDEL', KEYS[2], 'left')
end

local line = open(KEYS[1], KEYS[2])
settle(line, now)

local there = record(line, id)
if there then
  if there.token == 0 and ARGV[6] ~= '1' then
    remove(line, there)
    advance(line, now)
    return finish(line, changes, { 'busy' })
  end
  if ARGV[9] == '1' then store(line, there) end
  return finish(line, changes, standing(line, there, now))
end

if weight > 0 and line.parts > 0 and line.capacity ~= capacity then
  return finish(line, changes, { 'mismatch', text(line.capacity) })
end

if line.waiting == 0 and fits(line, claim) then
  local held, why = hold(line, claim, ends, now)
  if not held then
    finish(line, changes)
    return why
  end
  count_part(line, claim, 1)
  return finish(line, changes, { 'held', text(claim.token), text(ttl * 1000), '0' })
end
if ARGV[6] ~= '1' then return finish(line, changes, { 'busy' }) end

local last = redis.call('ZREVRANGE', line.hash .. ':queue', 0, 0, 'WITHSCORES')[2]
redis.call('ZADD', line.hash .. ':queue', text(tonumber(last or '0') + 1), id)
redis.call('ZADD', line.hash .. ':leases', text(ends), id)
store(line, claim)
count_part(line, claim, 1)
line.waiting, changed = line.waiting + 1, true
return finish(line, changes,
  { 'waiting', '0', text(ttl * 1000), text(due(line, claim, now)) })
