-- look.lua: where a claim stands.
-- KEYS: the key, the hash.  ARGV: changes channel, id, replicated (1: make a grant a write, so
-- that WAIT on this connection covers it).
-- Answers {gone} | {held or waiting, token, lease left, look again in}.

local now = clock()
local line = open(KEYS[1], KEYS[2])
settle(line, now)
local claim = record(line, ARGV[2])
if claim and claim.token > 0 and ARGV[3] == '1' then store(line, claim) end
return finish(line, ARGV[1], claim and standing(line, claim, now) or { 'gone' })
