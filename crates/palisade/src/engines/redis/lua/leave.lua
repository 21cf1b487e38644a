-- leave.lua: gives a place up, if the incarnation matches, and grants and wakes the next.
-- KEYS: the key, the hash.  ARGV: id, count (0: unknown), in doubt (1 or 0).
-- Answers "ID left", or "ID absent" when it was not in the line.

-- How long a claim that was left before it arrived is remembered, in microseconds: far longer
-- than a request can be under way, short enough that the memory stays small.
local REMEMBERED = 300 * 1000000

local now = clock()
local id, count = ARGV[1], tonumber(ARGV[2])
local line = open(KEYS[1], KEYS[2])
settle(line, now)

local claim = record(line, id)
local found = claim and (count == 0 or claim.token == 0 or claim.token == count)
if found then
  remove(line, claim)
  advance(line, now)
end

-- A copy of its enter may still be under way: it must find that it was left.
if ARGV[3] == '1' or (not found and count == 0) then
  local ends = now + REMEMBERED
  local tombs = line.hash .. ':left'
  redis.call('ZREMRANGEBYSCORE', tombs, '-inf', text(now))
  redis.call('ZADD', tombs, text(ends), id)
  redis.call('PEXPIREAT', tombs, millis(ends))
  redis.call('HSET', line.hash, 'left', text(ends))
end
return finish(line, id .. (found and ' left' or ' absent'))
