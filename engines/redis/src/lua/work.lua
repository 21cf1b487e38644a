-- work.lua: what all scripts of work queues share; src/core/queue says what they must bear.
-- KEYS: the queue W, W:due.  ARGV: a word that begins the answer, so that it is known for ours; then
-- the verb's own.  Times are microseconds of this server's clock.
--
-- W          hash: last (of the numbers and tokens that were given)
-- W:m:N      hash: message N; token is that of its claim, 0 without one
-- W:all      sorted set: all messages, by their numbers
-- W:due      sorted set: those that are ready or kept back, by when they may be claimed
-- W:lease    sorted set: those that are claimed, by when their leases end
-- W:dead     sorted set: dead letters
-- W:k:KEY    list: the messages of a key; the first alone is in one of the sets above
-- W:ids, W:idexp   hash, sorted set: ids that were pushed, their messages, until when
-- W:sleep    sorted set: consumers that sleep, "CHANNEL ID", by since when
-- W:left     sorted set: claims that were given up before they came, by until when
local W, WORD = KEYS[1], ARGV[1]
local ASLEEP, REMEMBERED = 3000000, 300000000

local function text(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local last
local function give()
  last = last or tonumber(redis.call('HGET', W, 'last') or '0')
  last = math.max(last + 1, now)
  redis.call('HSET', W, 'last', text(last))
  return text(last)
end

local function of(n) return W .. ':m:' .. n end

-- Wakes as many consumers as there are messages, those first that fell asleep last: they live.
local function wake(count)
  while count > 0 do
    local asleep = redis.call('ZREVRANGE', W .. ':sleep', 0, 0, 'WITHSCORES')
    if not asleep[1] then return end
    redis.call('ZREM', W .. ':sleep', asleep[1])
    if tonumber(asleep[2]) < now - ASLEEP then
      redis.call('DEL', W .. ':sleep')
      return
    end
    local channel, id = string.match(asleep[1], '^(%S+) (%S+)$')
    local heard = redis.pcall('PUBLISH', 'palisade:wake:' .. channel, id)
    if type(heard) ~= 'number' then return end
    if heard > 0 then count = count - 1 end
  end
end

-- Puts a message where it is due, and wakes a consumer if that is now.
local function ready(n, due)
  redis.call('ZADD', W .. ':due', text(due), n)
  if due <= now then wake(1) end
end

-- Lets the next of a key come first.
local function promote(key)
  local n = redis.call('LINDEX', W .. ':k:' .. key, 0)
  if n and redis.call('HGET', of(n), 'behind') == '1' then
    redis.call('HSET', of(n), 'behind', '0')
    ready(n, math.max(tonumber(redis.call('HGET', of(n), 'after')), now))
  end
end

local function remove(n)
  local key = redis.call('HGET', of(n), 'key')
  redis.call('DEL', of(n))
  for _, set in ipairs({':all', ':due', ':lease', ':dead'}) do redis.call('ZREM', W .. set, n) end
  if key and key ~= '' then
    redis.call('LREM', W .. ':k:' .. key, 1, n)
    promote(key)
  end
end

local function is_claim(n, token)
  return token ~= '0' and redis.call('HGET', of(n), 'token') == token
end

local function unclaim(n)
  redis.call('ZREM', W .. ':lease', n)
  redis.call('ZREM', W .. ':due', n)
  redis.call('HSET', of(n), 'token', '0')
  redis.call('HDEL', of(n), 'batch', 'owner')
end

-- Gives a message back that nobody has tried.
local function untried(n)
  unclaim(n)
  redis.call('HINCRBY', of(n), 'attempts', -1)
  ready(n, tonumber(redis.call('HGET', of(n), 'after')))
end

-- What a batch has claimed and not ended.
local function claimed_by(batch)
  local found = {}
  for _, n in ipairs(redis.call('ZRANGE', W .. ':lease', 0, -1)) do
    if redis.call('HGET', of(n), 'batch') == batch then found[#found + 1] = n end
  end
  return found
end

-- The message that an id stands for, in a list.
local function numbered(id)
  local n = string.match(id, '^@(%d+)$') or redis.call('HGET', W .. ':ids', id)
  return n and {n} or {}
end

-- Leases that have ended: their messages are due since then.
local function expire(limit)
  local ended = redis.call('ZRANGEBYSCORE', W .. ':lease', '-inf', text(now), 'WITHSCORES', 'LIMIT', 0, limit)
  for i = 1, #ended, 2 do
    redis.call('ZREM', W .. ':lease', ended[i])
    redis.call('ZADD', W .. ':due', ended[i + 1], ended[i])
  end
end
