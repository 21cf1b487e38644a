-- work_renew.lua: renews claims. ARGV: another ttl, or ''; then number and token of each. Answers the
-- ttl of each, or 0 when it is over.
local answer = {WORD}
for i = 3, #ARGV, 2 do
  local n, token = ARGV[i], ARGV[i + 1]
  local ends = tonumber(redis.call('ZSCORE', W .. ':lease', n) or '0')
  if is_claim(n, token) and ends > now then
    if ARGV[2] ~= '' then redis.call('HSET', of(n), 'ttl', ARGV[2]) end
    local ttl = redis.call('HGET', of(n), 'ttl')
    redis.call('ZADD', W .. ':lease', text(math.max(ends, now + tonumber(ttl))), n)
    answer[#answer + 1] = ttl
  else
    answer[#answer + 1] = '0'
  end
end
return answer
