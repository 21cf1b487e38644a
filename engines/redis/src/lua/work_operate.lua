-- work_operate.lua: what an operator does to messages. ARGV: retry | drop; all | dead | id, the id; 1
-- to drop claimed ones too. Answers how many.
local does, which, force = ARGV[2], ARGV[3], ARGV[5] == '1'
expire(1000)
local numbers
if which == 'id' then
  numbers = numbered(ARGV[4])
else
  numbers = redis.call('ZRANGE', W .. (which == 'dead' and ':dead' or ':all'), 0, -1)
end
local count = 0
for _, n in ipairs(numbers) do
  local said = redis.call('HMGET', of(n), 'id', 'behind', 'after')
  local claimed = redis.call('ZSCORE', W .. ':lease', n)
  if not said[2] then
    -- It is gone.
  elseif does == 'drop' and (force or not claimed) then
    remove(n)
    if said[1] ~= '' then
      redis.call('HDEL', W .. ':ids', said[1])
      redis.call('ZREM', W .. ':idexp', said[1])
    end
    count = count + 1
  elseif does == 'retry' and not claimed and said[2] == '0' then
    unclaim(n)
    redis.call('ZREM', W .. ':dead', n)
    redis.call('HSET', of(n), 'attempts', '0', 'after', text(math.min(tonumber(said[3]), now)))
    ready(n, now)
    count = count + 1
  end
end
return {WORD, text(count)}
