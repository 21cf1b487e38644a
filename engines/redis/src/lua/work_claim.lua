-- work_claim.lua: claims the first messages that are due. ARGV: batch, 1 if it is asked again,
-- count, ttl, how often a message may be claimed, owner, "CHANNEL ID" of a sleeper or ''.
-- Answers when to look again (microseconds from now, '' when nothing is known), then number, id,
-- key, token, attempts and body of each.
local batch, again, count, ttl = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local most, owner, sleeper = tonumber(ARGV[6]), ARGV[7], ARGV[8]
local answer = {WORD, ''}

local function deliver(n, token, attempts)
  local said = redis.call('HMGET', of(n), 'id', 'key', 'body')
  for _, field in ipairs({n, said[1], said[2], token, attempts, said[3]}) do
    answer[#answer + 1] = field
  end
end

if again == '1' then
  for _, n in ipairs(claimed_by(batch)) do
    local said = redis.call('HMGET', of(n), 'token', 'attempts', 'ttl')
    redis.call('ZADD', W .. ':lease', text(now + tonumber(said[3])), n)
    deliver(n, said[1], said[2])
  end
  if #answer > 2 then return answer end
end
if redis.call('ZSCORE', W .. ':left', batch) then return answer end

expire(count)
for _, n in ipairs(redis.call('ZRANGEBYSCORE', W .. ':due', '-inf', text(now), 'LIMIT', 0, count)) do
  local said = redis.call('HMGET', of(n), 'attempts', 'why')
  local attempts = tonumber(said[1] or '0')
  redis.call('ZREM', W .. ':due', n)
  if attempts >= most then
    local why = (said[2] and said[2] .. '; ' or '') .. 'its last consumer was lost'
    redis.call('HSET', of(n), 'token', '0', 'why', why)
    redis.call('HDEL', of(n), 'batch', 'owner')
    redis.call('ZADD', W .. ':dead', n, n)
    -- There may be more behind it.
    answer[2] = '0'
  else
    local token = give()
    redis.call('HSET', of(n), 'token', token, 'attempts', text(attempts + 1), 'ttl', text(ttl),
      'batch', batch, 'owner', owner)
    redis.call('ZADD', W .. ':lease', text(now + ttl), n)
    deliver(n, token, text(attempts + 1))
  end
end
if #answer == 2 and answer[2] == '' then
  for _, set in ipairs({':due', ':lease'}) do
    local next = redis.call('ZRANGE', W .. set, 0, 0, 'WITHSCORES')[2]
    if next and (answer[2] == '' or tonumber(next) - now < tonumber(answer[2])) then
      answer[2] = text(math.max(tonumber(next) - now, 0))
    end
  end
  if sleeper ~= '' then redis.call('ZADD', W .. ':sleep', text(now), sleeper) end
end
return answer
