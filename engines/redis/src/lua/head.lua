-- head.lua: stands before every script.
-- VERSION begins the state of a line (see line.lua). IDLE is how long a line that nobody asks for
-- is remembered, in ms: tokens are floored by the clock, so that forgetting it costs nothing.
local KEYS, ARGV = KEYS, ARGV
local VERSION, IDLE = 'v2 ', '604800000'

