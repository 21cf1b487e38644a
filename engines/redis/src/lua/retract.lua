-- retract.lua: gives a vote back, and tells those who wait for the line.
-- KEYS: the key, the state.  ARGV: the id; the count (0: any), with a "?" behind it if a copy of its
-- vote may still be under way; the try (its proposal) that is given up, nothing for all of them.
-- Answers the id and the count, as they were given, then "left" | "absent" | "other": the claim is there with another count.

-- As in leave.lua.
local REMEMBERED = 300 * 1000000

local now = clock()
local id, try = ARGV[1], ARGV[3]
local count, in_doubt = string.match(ARGV[2], '^(%d+)(%??)$')
count = tonumber(count)

local line = open(KEYS[1], KEYS[2])
settle(line, now)

local claim = record(line, id)
local found = claim and (count == 0 or claim.token == count)
if found then
  remove(line, claim)
  advance(line, now)
  redis.pcall('PUBLISH', 'palisade:free:' .. line.key, '')
end

if in_doubt == '?' or (not claim and count == 0) then
  local ends = now + REMEMBERED
  local tombs = line.state .. ':left'
  redis.call('ZREMRANGEBYSCORE', tombs, '-inf', text(now))
  redis.call('ZADD', tombs, text(ends), try and id .. ' ' .. try or id)
  redis.call('PEXPIREAT', tombs, millis(ends))
  line.left, changed = ends, true
end
return finish(line, id .. ' ' .. ARGV[2] .. (found and ' left' or claim and ' other' or ' absent'))
