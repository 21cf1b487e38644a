-- work_settle.lua: ends claims. ARGV: done | again | dead | untried, after, why; then number and token
-- of each. Answers 1 for each that was in force.
local how, after, why = ARGV[2], tonumber(ARGV[3]), ARGV[4]
local answer = {WORD}
for i = 5, #ARGV, 2 do
  local n, token = ARGV[i], ARGV[i + 1]
  if not is_claim(n, token) then
    answer[#answer + 1] = '0'
  else
    answer[#answer + 1] = '1'
    if how == 'done' then
      remove(n)
    elseif how == 'untried' then
      untried(n)
    else
      unclaim(n)
      if why ~= '' then redis.call('HSET', of(n), 'why', why) end
      if how == 'dead' then
        redis.call('ZADD', W .. ':dead', n, n)
      else
        ready(n, now + after)
      end
    end
  end
end
return answer
