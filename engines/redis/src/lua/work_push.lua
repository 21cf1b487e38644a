-- work_push.lua: adds messages. ARGV: how long ids are remembered; then delay, id, key and body of
-- each. Answers the number of each, and 1 if it was there before.
local answer, remembered = {WORD}, tonumber(ARGV[2])
local ids, awake = 0, 0
for i = 3, #ARGV, 4 do
  local delay, id, key, body = tonumber(ARGV[i]), ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local known = id ~= '' and redis.call('HGET', W .. ':ids', id)
  if known and redis.call('EXISTS', of(known)) == 0
     and tonumber(redis.call('ZSCORE', W .. ':idexp', id) or '0') < now then
    known = false
  end
  if known then
    answer[#answer + 1] = known
    answer[#answer + 1] = '1'
  else
    local n, after, behind = give(), now + delay, '0'
    if key ~= '' and redis.call('RPUSH', W .. ':k:' .. key, n) > 1 then behind = '1' end
    redis.call('HSET', of(n), 'body', body, 'id', id, 'key', key, 'token', '0', 'attempts', '0',
      'behind', behind, 'pushed', text(now), 'after', text(after))
    redis.call('ZADD', W .. ':all', n, n)
    if behind == '0' then
      redis.call('ZADD', W .. ':due', text(after), n)
      if delay == 0 then awake = awake + 1 end
    end
    if id ~= '' then
      ids = ids + 1
      redis.call('HSET', W .. ':ids', id, n)
      redis.call('ZADD', W .. ':idexp', text(now + remembered), id)
    end
    answer[#answer + 1] = n
    answer[#answer + 1] = '0'
  end
end
if ids > 0 then
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', W .. ':idexp', '-inf', text(now), 'LIMIT', 0, 2 * ids)) do
    if redis.call('EXISTS', of(redis.call('HGET', W .. ':ids', id) or '')) == 1 then
      -- In the queue for longer than that: it is looked at again later.
      redis.call('ZADD', W .. ':idexp', text(now + remembered), id)
    else
      redis.call('ZREM', W .. ':idexp', id)
      redis.call('HDEL', W .. ':ids', id)
    end
  end
end
wake(awake)
return answer
