-- Put before the scripts that need it (`scripts.py`). Compares a worker {fingerprint of the model, KV
-- scheme, dtype's class} with a batch {the same three, mixed}. A field that the batch lacks fits. A
-- mixed batch fits any scheme and dtype. '*' is not compared.
local function suits(maker, said)
  for index = 1, 3 do
    if said[index] and said[index] ~= maker[index] and maker[index] ~= '*'
        and (index == 1 or not said[4]) then
      return false
    end
  end
  return true
end
