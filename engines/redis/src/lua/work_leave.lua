-- work_leave.lua: gives back what a claim took that was given up. ARGV: the batch. What it has not
-- brought yet may come, and must find nothing. Answers how many.
local found = claimed_by(ARGV[2])
for _, n in ipairs(found) do untried(n) end
redis.call('ZREMRANGEBYSCORE', W .. ':left', '-inf', text(now))
redis.call('ZADD', W .. ':left', text(now + REMEMBERED), ARGV[2])
return {WORD, text(#found)}
