"""The broker's Lua scripts, each of which happens at once or not at all.

`srl.runner.distribution.broker` calls them; keys and fields are in docs/broker.md. Every script of a worker begins with
the fence: it does nothing where another worker holds the lease by now.
"""

_LUA = """
local function final(state) return state == 'done' or state == 'failed' or state == 'cancelled' end
local function now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end
"""

# KEYS: tasks, queue, task, checkpoint. ARGV: id, name, start's train count, checkpoint, fields and values of the task.
# A repeated call (its answer was lost) changes nothing. Scores increase even within a millisecond.
CREATE = (
    _LUA
    + """
if redis.call('EXISTS', KEYS[3]) == 1 then return {} end
if ARGV[2] ~= '' then
  for _, task in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
    local other = redis.call('HMGET', 'srl:' .. task .. ':task', 'name', 'state')
    if other[1] == ARGV[2] and not final(other[2]) then return {other[2]} end
  end
end
local ms = now_ms()
local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
if last[2] and tonumber(last[2]) >= ms then ms = tonumber(last[2]) + 1 end
redis.call('HSET', KEYS[3], 'state', 'waiting', 'created_ms', ms, 'train_count', ARGV[3], 'version', 0,
  'sent_bytes', 0, 'received_bytes', 0, unpack(ARGV, 5))
if ARGV[4] ~= '' then redis.call('HSET', KEYS[4], 'blob', ARGV[4], 'id', 0) end
redis.call('ZADD', KEYS[1], ms, ARGV[1])
redis.call('ZADD', KEYS[2], ms, ARGV[1])
return {}
"""
)

# Lays down again what a server lost that came back empty. KEYS: tasks, queue, task, workers, checkpoint. ARGV: id,
# checkpoint, milliseconds that the task has run for, fields and values of the task, among them the caller's lease.
RESTORE = (
    _LUA
    + """
if redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
local ms = now_ms()
redis.call('HSET', KEYS[3], 'state', 'running', 'created_ms', ms, 'started_ms', ms - tonumber(ARGV[3]),
  'sent_bytes', 0, 'received_bytes', 0, unpack(ARGV, 4))
redis.call('HSET', KEYS[4], 'trainer', ms .. ' ')
if ARGV[2] ~= '' then redis.call('HSET', KEYS[5], 'blob', ARGV[2], 'id', ms) end
redis.call('ZADD', KEYS[1], ms, ARGV[1])
redis.call('ZADD', KEYS[2], ms, ARGV[1])
return 1
"""
)

# KEYS: task, workers. ARGV: role, slots, nonce, lease time. Actors beyond those asked for enlarge the backlog.
# The lease is the token in the task; the last heartbeat says whether its holder is alive. So a holder that
# was cut off for long goes on where it was, unless somebody else took over meanwhile.
ACQUIRE = (
    _LUA
    + """
local state = redis.call('HGET', KEYS[1], 'state')
if not state or final(state) then return {} end
local ms = now_ms()
for slot = 0, tonumber(ARGV[2]) - 1 do
  local worker = ARGV[1] == 'trainer' and 'trainer' or 'actor-' .. slot
  local holder = redis.call('HGET', KEYS[1], 'lease:' .. worker)
  if holder and holder:match(':(.*)$') == ARGV[3] then return {slot, holder} end
  local beat = redis.call('HGET', KEYS[2], worker)
  if holder and not beat then
    -- An actor that took its place again in a restored task, and has not beaten since.
    beat = ms .. ' '
    redis.call('HSET', KEYS[2], worker, beat)
  end
  if not holder or ms - tonumber(beat:match('^%d+')) > tonumber(ARGV[4]) then
    local token = redis.call('HINCRBY', KEYS[1], 'epoch', 1) .. ':' .. ARGV[3]
    redis.call('HSET', KEYS[1], 'lease:' .. worker, token)
    redis.call('HSET', KEYS[2], worker, ms .. ' ')
    if ARGV[1] == 'trainer' then
      redis.call('HSET', KEYS[1], 'state', 'running')
      redis.call('HSETNX', KEYS[1], 'started_ms', ms)
    else
      local backlog = redis.call('HMGET', KEYS[1], 'backlog_limit', 'actor_backlog')
      local wanted = tonumber(backlog[2]) * (slot + 1)
      if wanted > tonumber(backlog[1]) then
        redis.call('HSET', KEYS[1], 'backlog_limit', string.format('%.0f', wanted))
      end
    end
    return {slot, token}
  end
end
return {}
"""
)

# KEYS: task, workers. ARGV: lease, token, worker. What a worker did for a finished task stays to be seen.
RELEASE = (
    _LUA
    + """
local task = redis.call('HMGET', KEYS[1], ARGV[1], 'state')
if task[1] ~= ARGV[2] or final(task[2]) then return 0 end
redis.call('HDEL', KEYS[2], ARGV[3])
return redis.call('HDEL', KEYS[1], ARGV[1])
"""
)

# KEYS: queue, task, events, experience, then the rest. ARGV: id, state, error, seconds to keep, lease, token.
FINISH = (
    _LUA
    + """
local task = redis.call('HMGET', KEYS[2], 'state', ARGV[5])
if not task[1] or final(task[1]) then return 0 end
if ARGV[5] ~= '' and task[2] ~= ARGV[6] then return 0 end
redis.call('HSET', KEYS[2], 'state', ARGV[2], 'error', ARGV[3], 'finished_ms', now_ms())
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[4])
redis.call('XADD', KEYS[3], '*', 'worker', '', 'message', ARGV[2])
for i = 2, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[4]) end
return 1
"""
)

# KEYS: task, events. ARGV: worker, message, length, seconds to keep. Late errors of a finished task are kept as long.
ADD_ERROR = (
    _LUA
    + """
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return 0 end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'worker', ARGV[1], 'message', ARGV[2])
if final(state) then redis.call('EXPIRE', KEYS[2], ARGV[4]) end
return 1
"""
)

# Every worker's call begins with this: KEYS[1] is the task, ARGV[1] the lease's field, ARGV[2] its token.
# An actor whose place nobody has takes it again: a server that came back has lost it. Not so a trainer, since another
# one may have been there and gone, and what it did must not be undone.
_FENCE = (
    _LUA
    + """
local task = redis.call('HMGET', KEYS[1], ARGV[1], 'state', 'train_count', 'version',
  'backlog_limit', 'sent_bytes', 'received_bytes')
if not task[2] then return {'gone'} end
if not task[1] and not final(task[2]) and ARGV[1]:match('^lease:actor') then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
  task[1] = ARGV[2]
end
if task[1] ~= ARGV[2] then return {} end
if final(task[2]) then return {task[2]} end
local room = tonumber(task[5]) - tonumber(task[6]) + tonumber(task[7])
if task[6] == task[7] then room = math.huge end
local sent, rank, actors = 0, 0, 0
"""
)
_REPLY = "return {task[3], task[4], tostring(room), sent, rank, actors}"

# ARGV: worker, status, and for an actor that asks how many actors there are: the age of a heartbeat that still counts.
BEAT = (
    _FENCE
    + """
local ms = now_ms()
redis.call('HSET', KEYS[2], ARGV[3], ms .. ' ' .. ARGV[4])
if ARGV[5] ~= '' then
  local mine = tonumber(ARGV[3]:match('%d+$'))
  local beats = redis.call('HGETALL', KEYS[2])
  for i = 1, #beats, 2 do
    local slot = tonumber(beats[i]:match('^actor%-(%d+)$'))
    if slot and ms - tonumber(beats[i + 1]:match('^%d+')) <= tonumber(ARGV[5]) then
      actors = actors + 1
      if slot < mine then rank = rank + 1 end
    end
  end
end
"""
    + _REPLY
)

# ARGV: message, its bytes unpacked, how many times the backlog's limit it may be above that.
SEND = (
    _FENCE
    + """
if tonumber(ARGV[4]) <= room + tonumber(ARGV[5]) * tonumber(task[5]) then
  redis.call('XADD', KEYS[2], '*', 'd', ARGV[3])
  redis.call('HINCRBY', KEYS[1], 'sent_bytes', ARGV[4])
  sent = 1
end
"""
    + _REPLY
)

# ARGV: the lowest stream id to keep ('' keeps all), fields and values of the task.
COMMIT = (
    _FENCE
    + """
if ARGV[3] ~= '' then redis.call('XTRIM', KEYS[2], 'MINID', '=', ARGV[3]) end
redis.call('HSET', KEYS[1], unpack(ARGV, 4))
-- A server that came back without its last second has lost messages that were counted, or counts some twice.
if ARGV[3] ~= '' and redis.call('XLEN', KEYS[2]) == 0 then
  redis.call('HSET', KEYS[1], 'sent_bytes', redis.call('HGET', KEYS[1], 'received_bytes'))
end
"""
    + _REPLY
)

STORE_CHECKPOINT = (
    _FENCE
    + """
redis.call('HSET', KEYS[2], 'blob', ARGV[3])
redis.call('HINCRBY', KEYS[2], 'id', 1)
"""
    + _REPLY
)

ADD_HISTORY = (
    _FENCE
    + """
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if not last or last[2][2] ~= ARGV[3] then  -- else its answer was lost, and it is called again
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'row', ARGV[3])
end
if ARGV[5] ~= '' then redis.call('HSET', KEYS[1], 'evaluation', ARGV[5]) end
"""
    + _REPLY
)
