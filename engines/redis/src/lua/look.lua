-- look.lua: where a claim stands.
-- KEYS: the key, the state.  ARGV: id, and, if replicas must have a grant, anything (see enter.lua).
-- Answers "ID gone" | "ID PLACE TOKEN LEFT LOOK-AGAIN-IN".

local now = clock()
local line = open(KEYS[1], KEYS[2])
settle(line, now)
local claim = record(line, ARGV[1])
if claim and claim.token > 0 and ARGV[2] then store(line, claim) end
return finish(line, ARGV[1] .. ' ' .. (claim and standing(line, claim, now) or 'gone'))
