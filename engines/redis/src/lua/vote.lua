-- vote.lua: takes a place on one of several independent servers, at once or not at all.
-- KEYS: the key, the state.  ARGV: the id, "weight capacity lasts" (0 0: the whole line; ttl in ms
-- and 2 for the rounding), " ttl evicted channel [@PERMIT ]owner[\nvalue]", the token that the client
-- proposes, which also names this try.
-- Answers the id and the proposal, then "held TOKEN" (new) | "held TOKEN LEFT 0 PERMITS" | "busy LOOK-AGAIN-IN PERMITS"
-- | "left" (given up before it arrived) | "mismatch CAPACITY"; times in us, PERMITS those in use.

local now = clock()
local id = ARGV[1]
local line = open(KEYS[1], KEYS[2])
local claim = parse(id, string.match(ARGV[2], '^%d+ %d+ ') .. '0' .. ARGV[3])
local permit = string.match(claim.rest, '^@(%d+) ')

local function was_left()
  for _, try in ipairs({ id, id .. ' ' .. ARGV[4] }) do
    local remembered = redis.call('ZSCORE', line.state .. ':left', try)
    if remembered and tonumber(remembered) > now then return true end
  end
end

-- The permits in use, and whether the one that is asked for is among them.
local function in_use()
  local permits, taken = {}, false
  if line.value and not line.whole then
    for _, other in ipairs(redis.call('ZRANGE', line.state .. ':shares', 0, -1)) do
      local found = string.match(stored(line, other) or '', '^%d+ %d+ %d+ %d+ %d %S+ @(%d+) ')
      permits[#permits + 1] = found
      taken = taken or found == permit
    end
  end
  return taken, table.concat(permits, ',')
end

local function vote()
  if line.left > now then
    if was_left() then return 'left' end
  elseif line.left > 0 then
    line.left, changed = 0, true
  end
  settle(line, now)
  local there = record(line, id)
  local taken, permits = in_use()
  if there then return standing(line, there, now) .. ' ' .. permits end
  if claim.weight > 0 and line.parts > 0 and line.capacity ~= claim.capacity then
    return 'mismatch ' .. text(line.capacity)
  end
  if line.waiting > 0 or (permit and taken) or not fits(line, claim) then
    return 'busy ' .. text(due(line, claim, now)) .. ' ' .. permits
  end
  local held, why = hold(line, claim, now + claim.ttl * 1000, tonumber(ARGV[4]))
  if not held then return nil, why end
  count_part(line, claim, 1)
  return 'held ' .. text(claim.token) .. ' ' .. text(claim.ttl * 1000) .. ' 0 ' .. permits
end

local answer, why = vote()
return finish(line, answer and id .. ' ' .. ARGV[4] .. ' ' .. answer or why)
