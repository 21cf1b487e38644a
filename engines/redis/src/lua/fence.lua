-- fence.lua: a fenced resource. KEYS: its data (a string or a hash), its mark (the highest token).
-- ARGV: what to do, then the token, whether each token writes once, and what to write. Tokens are
-- 20 digits and compared as text: a number of Lua has only 53 bits. Answers with the mark that
-- stands against a token, or '' when it is accepted. To take answers with the data as well, as it is
-- when the mark has been raised.
local does, token, once = ARGV[1], ARGV[2], ARGV[3]
local mark = redis.call('GET', KEYS[2])
if mark and not mark:find('^' .. ('%d'):rep(20) .. '$') then
  return redis.error_reply('CORRUPT')
end
if does == 'read' then
  return mark and {mark, redis.call('GET', KEYS[1]) or ''} or false
elseif does == 'fields' then
  return mark and {mark, redis.call('HGETALL', KEYS[1])} or false
elseif does == 'highest' then
  return mark or ''
elseif does == 'forget' then
  -- The data first: a crash in between does not come, a script that ends half way might.
  redis.call('DEL', KEYS[1])
  return redis.call('DEL', KEYS[2])
end
local takes = does == 'take' or does == 'take_fields'
if mark and (token < mark or (once == '1' and token == mark)) then
  return takes and {mark, false} or mark
end
if takes then
  -- The data first: it may be of the other type. ARGV[4] is the mark to leave, '' for none.
  local data = redis.call(does == 'take' and 'GET' or 'HGETALL', KEYS[1])
  if ARGV[4] ~= '' then
    redis.call('SET', KEYS[2], ARGV[4])
  end
  return {'', data}
end
-- What can fail comes first: nothing is undone.
if does == 'write' then
  redis.call('SET', KEYS[1], ARGV[4])
elseif does == 'hash' then
  redis.call('HSET', KEYS[1], unpack(ARGV, 4))
end
redis.call('SET', KEYS[2], token)
return ''
