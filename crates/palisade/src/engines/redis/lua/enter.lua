-- enter.lua: takes places; grant, token and queueing of each in one step.
-- KEYS: the key and the state of each.  ARGV: of each the id, "weight capacity queue lasts" (0 0:
-- the whole line; queue 1 or 0; ttl in ms and 2 for the rounding), " ttl evicted channel
-- owner[\nvalue]"; then, if replicas must have the grants, anything: an answer is then a write, so
-- that WAIT on this connection covers it.
-- Answers the first id, then for each, in order: "busy" | "mismatch CAPACITY" | "held TOKEN" (new)
-- | "PLACE TOKEN LEFT LOOK-AGAIN-IN" | "error ...".

local now = clock()
local replicated = ARGV[3 * #KEYS / 2 + 1]

local function enter(key, state, id, asked, queues)
  local claim = parse(id, asked)
  local ends = now + claim.ttl * 1000
  local line = open(key, state)
  if line.left > now then
    local remembered = redis.call('ZSCORE', state .. ':left', id)
    if remembered and tonumber(remembered) > now then return 'busy' end
  elseif line.left > 0 then
    line.left, changed = 0, true
  end
  settle(line, now)

  local there = record(line, id)
  if there then
    if there.token == 0 and not queues then
      remove(line, there)
      advance(line, now)
      return finish(line, 'busy')
    end
    if replicated then store(line, there) end
    return finish(line, standing(line, there, now))
  end

  if claim.weight > 0 and line.parts > 0 and line.capacity ~= claim.capacity then
    return finish(line, 'mismatch ' .. text(line.capacity))
  end

  if line.waiting == 0 and fits(line, claim) then
    local held, why = hold(line, claim, ends, now)
    if not held then return finish(line, failure(why)) end
    count_part(line, claim, 1)
    return finish(line, 'held ' .. text(claim.token))
  end
  if not queues then return finish(line, 'busy') end

  local last = redis.call('ZREVRANGE', state .. ':queue', 0, 0, 'WITHSCORES')[2]
  redis.call('ZADD', state .. ':queue', text(tonumber(last or '0') + 1), id)
  redis.call('ZADD', state .. ':leases', text(ends), id)
  store(line, claim)
  count_part(line, claim, 1)
  line.waiting = line.waiting + 1
  return finish(line, standing(line, claim, now))
end

return each(left_over, answers, function(at)
  local ask, queue = string.match(ARGV[3 * at - 1], '^(%d+ %d+ )(%d)')
  return enter(KEYS[2 * at - 1], KEYS[2 * at], ARGV[3 * at - 2], ask .. '0' .. ARGV[3 * at],
    queue == '1')
end)
