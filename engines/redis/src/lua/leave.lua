-- leave.lua: gives a place up, if the incarnation matches, and grants and wakes the next.
-- KEYS: the key, the state.  ARGV: the id, and the count (0: unknown), with a "?" behind it if a
-- copy of its enter may still be under way.
-- Answers the id, then "left" | "absent" when it was not in the line.

-- How long a claim that was left before it arrived is remembered, in microseconds: far longer
-- than a request can be under way, short enough that the memory stays small.
local REMEMBERED = 300 * 1000000

local now = clock()
local id = ARGV[1]
local count, in_doubt = string.match(ARGV[2], '^(%d+)(%??)$')
count = tonumber(count)

local line = open(KEYS[1], KEYS[2])
settle(line, now)

local claim = record(line, id)
local found = claim and (count == 0 or claim.token == 0 or claim.token == count)
if found then
  remove(line, claim)
  advance(line, now)
end

-- A copy of its enter may still be under way: it must find that it was left.
if in_doubt == '?' or (not found and count == 0) then
  local ends = now + REMEMBERED
  local tombs = line.state .. ':left'
  redis.call('ZREMRANGEBYSCORE', tombs, '-inf', text(now))
  redis.call('ZADD', tombs, text(ends), id)
  redis.call('PEXPIREAT', tombs, millis(ends))
  line.left, changed = ends, true
end
return finish(line, id .. (found and ' left' or ' absent'))
