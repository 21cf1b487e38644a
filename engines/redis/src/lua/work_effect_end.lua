
end)({unpack(KEYS, 3)}, {unpack(ARGV, 4)})
remove(n)
if answered == nil then answered = false end
return {WORD, '1', answered}
