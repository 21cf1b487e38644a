-- evict.lua: an operator takes a place away.
-- KEYS: the key, the state.  ARGV: id, "mark" or "remove".
-- Answers "done" | "absent" | "foreign": another tool's lock, which can only be removed.

local now = clock()
local id = ARGV[1]
local line = open(KEYS[1], KEYS[2])
settle(line, now)

if line.foreign and line.foreign == id then
  if ARGV[2] == 'mark' then return finish(line, 'foreign') end
  redis.call('DEL', line.key)
  line.foreign, changed = false, true
  advance(line, now)
  return finish(line, 'done')
end

local claim = #id == 32 and record(line, id)
if not claim then return finish(line, 'absent') end
if ARGV[2] == 'mark' then
  claim.evicted = true
  store(line, claim)
else
  remove(line, claim)
  advance(line, now)
  redis.pcall('PUBLISH', 'palisade:wake:' .. claim.channel, id)
end
redis.pcall('PUBLISH', 'palisade:alarm:' .. claim.channel, id)
return finish(line, 'done')
