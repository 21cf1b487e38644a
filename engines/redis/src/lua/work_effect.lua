-- work_effect.lua: ends a claim together with an effect of the user's, whose code stands between this
-- and the end. ARGV: number, token, then the arguments of the user's. Answers whether the
-- claim was in force, and what the effect answered.
local n, token = ARGV[2], ARGV[3]
if not is_claim(n, token) then return {WORD, '0'} end
local answered = (function(KEYS, ARGV)
