-- raise.lua: raises the line's last token, and gives the claim's grant this token if it holds.
-- KEYS: the key, the state.  ARGV: the id, the token.
-- Answers the id and the token, then "held LEFT" (in us) | "absent".

local now = clock()
local token = tonumber(ARGV[2])
local line = open(KEYS[1], KEYS[2])
settle(line, now)
if token > line.token then line.token, changed = token, true end
local claim = record(line, ARGV[1])
local holds = claim and claim.token > 0
if holds then
  claim.token = token
  store(line, claim)
end
return finish(line, ARGV[1] .. ' ' .. ARGV[2]
  .. (holds and ' held ' .. text(math.max(ends_at(line, claim, now) - now, 0)) or ' absent'))
