-- survey.lua: who holds and who waits.
-- KEYS: the key, the state.
-- Answers {capacity, parts, foreign value or nil as "", lease of the foreign key in ms,
-- {id, record, lease left in us} of each holder, the same of each waiter in order}.

local now = clock()
local line = open(KEYS[1], KEYS[2])
settle(line, now)

local function show(ids)
  local shown = {}
  for _, id in ipairs(ids) do
    local claim = record(line, id)
    if claim then
      shown[#shown + 1] = { id, stored(line, id), text(ends_at(line, claim, now) - now) }
    end
  end
  return shown
end

local holders, waiters = {}, {}
if line.whole then
  holders = { line.value }
elseif line.value then
  holders = redis.call('ZRANGE', line.state .. ':shares', 0, -1)
end
if line.waiting > 0 then waiters = redis.call('ZRANGE', line.state .. ':queue', 0, -1) end
local foreign = line.foreign or ''
local lasts = line.foreign and redis.call('PTTL', line.key) or -1
return finish(line, {
  text(line.capacity), text(line.parts), foreign, text(lasts), show(holders), show(waiters),
})
