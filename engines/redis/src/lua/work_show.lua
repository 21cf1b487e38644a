-- work_show.lua: shows a queue. ARGV: count; or list, 1 for dead letters alone, limit; or read, id.
-- count answers ready, delayed, claimed, blocked, dead, and for how long the oldest that is ready has
-- waited, of the first MANY that are due.
-- The others answer number, id, key, state, attempts, pushed, in how long that changes or '', token,
-- owner, why, size and body of each; the body of one alone.
local answer = {WORD}
local does = ARGV[2]
local MANY = 1000
expire(MANY)
if does == 'count' then
  local ready = redis.call('ZCOUNT', W .. ':due', '-inf', text(now))
  local delayed = redis.call('ZCARD', W .. ':due') - ready
  local claimed, dead = redis.call('ZCARD', W .. ':lease'), redis.call('ZCARD', W .. ':dead')
  local all = redis.call('ZCARD', W .. ':all')
  -- One of a key has waited for longer than it is due.
  local since = now
  for _, n in ipairs(redis.call('ZRANGEBYSCORE', W .. ':due', '-inf', text(now), 'LIMIT', 0, MANY)) do
    since = math.min(since, tonumber(redis.call('HGET', of(n), 'after')) or now)
  end
  for _, count in ipairs({ready, delayed, claimed, all - ready - delayed - claimed - dead, dead}) do
    answer[#answer + 1] = text(count)
  end
  answer[#answer + 1] = text(now - since)
  return answer
end
local numbers
if does == 'read' then
  numbers = numbered(ARGV[3])
else
  local set = ARGV[3] == '1' and ':dead' or ':all'
  numbers = redis.call('ZRANGE', W .. set, 0, tonumber(ARGV[4]) - 1)
end
for _, n in ipairs(numbers) do
  local said = redis.call('HMGET', of(n), 'id', 'key', 'attempts', 'pushed', 'token', 'owner', 'why')
  if said[3] then
    local state, changes = 'blocked', ''
    local due = redis.call('ZSCORE', W .. ':due', n)
    local lease = redis.call('ZSCORE', W .. ':lease', n)
    if redis.call('ZSCORE', W .. ':dead', n) then
      state = 'dead'
    elseif lease then
      state, changes = 'claimed', text(math.max(tonumber(lease) - now, 0))
    elseif due and tonumber(due) <= now then
      state = 'ready'
    elseif due then
      state, changes = 'delayed', text(tonumber(due) - now)
    end
    local size = text(redis.call('HSTRLEN', of(n), 'body'))
    local body = does == 'read' and redis.call('HGET', of(n), 'body') or ''
    for _, field in ipairs({n, said[1], said[2], state, said[3], said[4], changes, said[5],
        said[6] or '', said[7] or '', size, body}) do
      answer[#answer + 1] = field
    end
  end
end
return answer
