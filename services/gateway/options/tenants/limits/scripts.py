"""The Lua scripts that count tenants' limits in Redis. Each script is atomic. The keys are:

    `limit:{t:ID}`    hash: bucket levels of tenant ID, and their time; expires when full
    `slots:{t:ID}`    sorted set: names of tenant ID's occupied slots, by their deadlines
    `limit:gateways`  sorted set: names of gateways, by the deadlines of their leases

Times are in milliseconds on the clock of Redis. The braces put the two keys of a tenant into the
same hash slot of a Redis Cluster. TAKE implements the rule in
`services.gateway.options.tenants.core.limits.rule` with the same integers.
"""

GATEWAYS = "limit:gateways"


def tenant_keys(tenant_id: str) -> tuple[str, str]:
    """Returns the key of a tenant's levels, and the key of its slots."""
    return f"limit:{{t:{tenant_id}}}", f"slots:{{t:{tenant_id}}}"


_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

TAKE = (
    _NOW
    + """
local UNITS, MAX_ELAPSED = 60000, 3600000
local limits = {tonumber(ARGV[1]), tonumber(ARGV[2])}
local amounts = {tonumber(ARGV[3]), tonumber(ARGV[4])}
local most, slot, slot_change = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])
local must_fit, lease = ARGV[8] == '1', tonumber(ARGV[9])

local state = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local elapsed = math.min(math.max(now - (tonumber(state[3]) or now), 0), MAX_ELAPSED)
local levels, needs = {}, {amounts[1], math.max(amounts[2], 1)}
local refused_by, wait = 0, 0
for i = 1, 2 do
  local limit = limits[i]
  levels[i] = limit * UNITS
  if limit > 0 and state[i] then
    levels[i] = math.min(levels[i], tonumber(state[i]) + elapsed * limit)
  end
  local needed = math.min(needs[i], limit) * UNITS
  if must_fit and refused_by == 0 and limit > 0 and needs[i] > 0 and levels[i] < needed then
    refused_by, wait = i, math.ceil((needed - levels[i]) / limit)
  end
end

redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local num_slots = redis.call('ZCARD', KEYS[2])
if must_fit and refused_by == 0 and slot_change == 1 and most > 0 and num_slots >= most
    and not redis.call('ZSCORE', KEYS[2], slot) then
  refused_by = 3
end

if refused_by == 0 then
  local full_in, fields = 0, {'at', string.format('%.0f', now)}
  for i, name in ipairs({'requests', 'tokens'}) do
    local limit = limits[i]
    if limit > 0 then
      levels[i] = math.min(limit * UNITS, levels[i] - amounts[i] * UNITS)
      full_in = math.max(full_in, math.ceil((limit * UNITS - levels[i]) / limit))
      fields[#fields + 1] = name
      fields[#fields + 1] = string.format('%.0f', levels[i])
    end
  end
  redis.call('DEL', KEYS[1])
  if full_in > 0 then
    redis.call('HSET', KEYS[1], unpack(fields))
    redis.call('PEXPIRE', KEYS[1], full_in)
  end
  if slot_change == 1 then
    redis.call('ZADD', KEYS[2], now + lease, slot)
    redis.call('PEXPIRE', KEYS[2], lease)
  elseif slot_change == -1 then
    redis.call('ZREM', KEYS[2], slot)
  end
  num_slots = redis.call('ZCARD', KEYS[2])
end
return {refused_by, wait, levels[1], levels[2], num_slots, now}
"""
)

HOLD = (
    _NOW
    + """
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return redis.status_reply('OK')
"""
)
"""Renews the leases of slots. The first argument is the duration of the leases in milliseconds. The
other arguments are the names of the slots.
"""

LEASE = (
    _NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[2])
return redis.call('ZCARD', KEYS[1])
"""
)
"""Renews the lease of a gateway, and returns the number of gateways with a lease."""
