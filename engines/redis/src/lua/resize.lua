-- resize.lua: gives the permits in a line another capacity.
-- KEYS: the key, the state.  ARGV: the new capacity, and that of readers.
-- Answers "done" | "none" without permits | "readers" | "heavy WEIGHT" when a claim weighs more.

local now = clock()
local capacity = tonumber(ARGV[1])
local line = open(KEYS[1], KEYS[2])
settle(line, now)

local function resize()
  if line.parts == 0 then return 'none' end
  if line.capacity == tonumber(ARGV[2]) then return 'readers' end
  local parts = {}
  local records = redis.call('HGETALL', line.state .. ':claims')
  for at = 1, #records, 2 do
    local claim = parse(records[at], records[at + 1])
    if claim.weight > capacity then return 'heavy ' .. text(claim.weight) end
    if claim.weight > 0 then parts[#parts + 1] = claim end
  end
  for _, claim in ipairs(parts) do
    claim.capacity = capacity
    store(line, claim)
  end
  line.capacity, changed = capacity, true
  advance(line, now)
  return 'done'
end

return finish(line, resize())
