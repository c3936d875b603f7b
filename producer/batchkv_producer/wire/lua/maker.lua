-- Put before the scripts that need it (`scripts.py`). Compares a worker {fingerprint of the model, KV
-- scheme, dtype's class} with a batch {the same three, mixed}. A field that the batch lacks fits. A
-- mixed batch fits any scheme and dtype. '*' is not compared.
local function suits(maker, fields)
  for index = 1, 3 do
    if fields[index] and fields[index] ~= maker[index] and maker[index] ~= '*'
        and (index == 1 or not fields[4]) then
      return false
    end
  end
  return true
end
