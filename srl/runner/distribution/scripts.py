"""The broker's Lua scripts, each of which happens at once or not at all.

`srl.runner.distribution.broker` calls them; keys and fields are in docs/broker.md. Every script of a worker begins with
a fence: it does nothing where another worker holds the lease by now.

Servers check a script's commands against the rights of who calls it, and want full rights to each of KEYS. Actors may
read a task but not write there, so their scripts get the task's key as an argument.
"""

MOST_SLOTS = 10_000
"""Actors that a task has room for."""

_LUA = (
    f"local MOST_SLOTS = {MOST_SLOTS}"
    + """
local function final(state) return state == 'done' or state == 'failed' or state == 'cancelled' end
local function now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end
-- What an actor may have written, whatever it was.
local function natural(text, most)
  local number = tonumber(text or '')
  if not number or number < 0 or number > (most or 2^53) then return 0 end
  return math.floor(number)
end
local function beat_ms(text) return natural((text or ''):match('^%d+')) end
"""
)

# KEYS: tasks, queue, task, checkpoint. ARGV: id, name, start's train count, checkpoint, most tasks, fields and values
# of the task. A repeated call (its answer was lost) changes nothing. Scores increase even within a millisecond.
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
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[5]) then return {'full'} end
local ms = now_ms()
local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
if last[2] and tonumber(last[2]) >= ms then ms = tonumber(last[2]) + 1 end
redis.call('HSET', KEYS[3], 'state', 'waiting', 'created_ms', ms, 'train_count', ARGV[3], 'version', 0,
  'received_bytes', 0, unpack(ARGV, 6))
if ARGV[4] ~= '' then redis.call('HSET', KEYS[4], 'blob', ARGV[4], 'id', 0) end
redis.call('ZADD', KEYS[1], ms, ARGV[1])
redis.call('ZADD', KEYS[2], ms, ARGV[1])
return {}
"""
)

# Lays down again what a server lost that came back empty. KEYS: tasks, queue, task, checkpoint. ARGV: id,
# checkpoint, milliseconds that the task has run for, fields and values of the task, among them the caller's lease.
RESTORE = (
    _LUA
    + """
if redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
local ms = now_ms()
redis.call('HSET', KEYS[3], 'state', 'running', 'created_ms', ms, 'started_ms', ms - tonumber(ARGV[3]),
  'received_bytes', 0, 'beat', ms .. ' ', unpack(ARGV, 4))
if ARGV[2] ~= '' then redis.call('HSET', KEYS[4], 'blob', ARGV[2], 'id', ms) end
redis.call('ZADD', KEYS[1], ms, ARGV[1])
redis.call('ZADD', KEYS[2], ms, ARGV[1])
return 1
"""
)

# A lease is a token in a hash; the last heartbeat says whether its holder is alive. So a holder that was cut off for
# long goes on where it was, unless somebody else took over meanwhile.

# KEYS: task. ARGV: nonce, lease time.
ACQUIRE_TRAINER = (
    _LUA
    + """
local task = redis.call('HMGET', KEYS[1], 'state', 'lease:trainer', 'beat')
if not task[1] or final(task[1]) then return {} end
local ms = now_ms()
if task[2] then
  if task[2]:match(':(.*)$') == ARGV[1] then return {0, task[2]} end
  if task[3] and ms - tonumber(task[3]:match('^%d+')) <= tonumber(ARGV[2]) then return {} end
end
local token = redis.call('HINCRBY', KEYS[1], 'epoch', 1) .. ':' .. ARGV[1]
redis.call('HSET', KEYS[1], 'lease:trainer', token, 'beat', ms .. ' ', 'state', 'running')
redis.call('HSETNX', KEYS[1], 'started_ms', ms)
return {0, token}
"""
)

# KEYS: actors, workers. ARGV: the task's key, slots, nonce, lease time. Actors beyond those asked for enlarge the
# backlog.
ACQUIRE_ACTOR = (
    _LUA
    + """
local state = redis.call('HGET', ARGV[1], 'state')
if not state or final(state) then return {} end
local ms = now_ms()
for slot = 0, tonumber(ARGV[2]) - 1 do
  local worker = 'actor-' .. slot
  local holder = redis.call('HGET', KEYS[1], 'lease:' .. worker)
  if holder and holder:match(':(.*)$') == ARGV[3] then return {slot, holder} end
  local beat = redis.call('HGET', KEYS[2], worker)
  if holder and not beat then
    -- An actor that took its place again in a restored task, and has not beaten since.
    beat = ms .. ' '
    redis.call('HSET', KEYS[2], worker, beat)
  end
  if not holder or ms - beat_ms(beat) > tonumber(ARGV[4]) then
    local epoch = natural(redis.call('HGET', KEYS[1], 'epoch')) + 1
    local token = string.format('%.0f', epoch) .. ':' .. ARGV[3]
    redis.call('HSET', KEYS[1], 'lease:' .. worker, token, 'epoch', string.format('%.0f', epoch))
    redis.call('HSET', KEYS[2], worker, ms .. ' ')
    local slots = natural(redis.call('HGET', KEYS[1], 'slots'), MOST_SLOTS)
    if slot >= slots then redis.call('HSET', KEYS[1], 'slots', slot + 1) end
    return {slot, token}
  end
end
return {}
"""
)

# What a worker did for a finished task stays to be seen.

# KEYS: task. ARGV: token.
RELEASE_TRAINER = (
    _LUA
    + """
local task = redis.call('HMGET', KEYS[1], 'lease:trainer', 'state')
if task[1] ~= ARGV[1] or final(task[2]) then return 0 end
return redis.call('HDEL', KEYS[1], 'lease:trainer', 'beat')
"""
)

# KEYS: actors, workers. ARGV: the task's key, token, worker.
RELEASE_ACTOR = (
    _LUA
    + """
if redis.call('HGET', KEYS[1], 'lease:' .. ARGV[3]) ~= ARGV[2] then return 0 end
if final(redis.call('HGET', ARGV[1], 'state')) then return 0 end
redis.call('HDEL', KEYS[2], ARGV[3])
return redis.call('HDEL', KEYS[1], 'lease:' .. ARGV[3])
"""
)

# KEYS: queue, task, events, experience, then the rest. ARGV: id, state, error, seconds to keep, the trainer's token
# or ''.
FINISH = (
    _LUA
    + """
local task = redis.call('HMGET', KEYS[2], 'state', 'lease:trainer')
if not task[1] or final(task[1]) then return 0 end
if ARGV[5] ~= '' and task[2] ~= ARGV[5] then return 0 end
redis.call('HSET', KEYS[2], 'state', ARGV[2], 'error', ARGV[3], 'finished_ms', now_ms())
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[4])
redis.call('XADD', KEYS[3], '*', 'worker', '', 'message', ARGV[2], 'fatal', '')
for i = 2, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[4]) end
return 1
"""
)

# Asks the trainer to end its run as if that had reached its stop condition. KEYS: task.
ASK_TO_END = (
    _LUA
    + """
if redis.call('HGET', KEYS[1], 'state') ~= 'running' then return 0 end
return redis.call('HSETNX', KEYS[1], 'ending', now_ms())
"""
)

# KEYS: events. ARGV: the task's key, worker, message, 1 where the worker leaves because of it, length. Late errors of a
# finished task are kept as long as the rest of it.
ADD_ERROR = (
    _LUA
    + """
local state = redis.call('HGET', ARGV[1], 'state')
if not state or (final(state) and redis.call('EXISTS', KEYS[1]) == 0) then return 0 end  -- it would never expire
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[5], '*', 'worker', ARGV[2], 'message', ARGV[3], 'fatal', ARGV[4])
return 1
"""
)

# --- the trainer, while it has its lease --------------------------------------------------------------------------

# KEYS[1] is the task, ARGV[1] the token. A trainer whose place nobody has does not take it again: another one may have
# been there and gone, and what it did must not be undone.
_TRAINER_FENCE = (
    _LUA
    + """
local task = redis.call('HMGET', KEYS[1], 'lease:trainer', 'state', 'train_count', 'version')
if not task[2] then return {'gone'} end
if task[1] ~= ARGV[1] then return {} end
if final(task[2]) then return {task[2]} end
"""
)
_TRAINER_REPLY = "return {task[3], task[4], 'inf', 0, 0, 0}"

# What is counted as sent is the actors' word. With an empty stream it is what was received: a server that came back
# without its last second has lost messages that were counted, or counts some twice.
_SETTLE = """
local function settle(experience, actors)
  if redis.call('XLEN', experience) == 0 then
    redis.call('HSET', actors, 'sent_bytes', redis.call('HGET', KEYS[1], 'received_bytes'))
  end
end
"""

# Keeps the lease, and what actors may write within bounds, whatever they do. KEYS: task, actors, workers, experience,
# events. ARGV: token, status, most bytes of the experience beside ten backlogs, most bytes of each other. Returns also
# the keys that were cleared, and whether somebody asked for the run's end.
WATCH = (
    _TRAINER_FENCE
    + _SETTLE
    + """
local backlog = redis.call('HMGET', KEYS[1], 'backlog_limit', 'actor_backlog', 'actor_num')
-- An actor that floods the hashes must not raise what all may send without bound.
local actors = math.min(redis.call('HLEN', KEYS[3]), 4 * tonumber(backlog[3]))
local experience = tonumber(ARGV[3]) + 10 * math.max(tonumber(backlog[1]), tonumber(backlog[2]) * actors)
local cleared = {}
for i = 2, 5 do
  local bytes = redis.call('MEMORY', 'USAGE', KEYS[i])
  if bytes and bytes > (i == 4 and experience or tonumber(ARGV[4])) then
    redis.call('DEL', KEYS[i])
    cleared[#cleared + 1] = KEYS[i]
  end
end
-- After that: a server that is out of memory takes nothing new from a script that has not yet freed anything.
redis.call('HSET', KEYS[1], 'beat', now_ms() .. ' ' .. ARGV[2])
settle(KEYS[4], KEYS[2])
return {task[3], task[4], 'inf', 0, 0, 0, cleared, redis.call('HEXISTS', KEYS[1], 'ending')}
"""
)

# KEYS: task, experience, actors. ARGV: token, the lowest stream id to keep ('' keeps all), how many fields of the task
# to delete, these, then fields and values of the task to set.
COMMIT = (
    _TRAINER_FENCE
    + _SETTLE
    + """
if ARGV[2] ~= '' then redis.call('XTRIM', KEYS[2], 'MINID', '=', ARGV[2]) end
local forgotten = tonumber(ARGV[3])
if forgotten > 0 then redis.call('HDEL', KEYS[1], unpack(ARGV, 4, 3 + forgotten)) end
redis.call('HSET', KEYS[1], unpack(ARGV, 4 + forgotten))
if ARGV[2] ~= '' then settle(KEYS[2], KEYS[3]) end
"""
    + _TRAINER_REPLY
)

# KEYS: task, checkpoint. ARGV: token, checkpoint.
STORE_CHECKPOINT = (
    _TRAINER_FENCE
    + """
redis.call('HSET', KEYS[2], 'blob', ARGV[2])
redis.call('HINCRBY', KEYS[2], 'id', 1)
"""
    + _TRAINER_REPLY
)

# KEYS: task, history. ARGV: token, row, length, evaluation or ''.
ADD_HISTORY = (
    _TRAINER_FENCE
    + """
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if not last or last[2][2] ~= ARGV[2] then  -- else its answer was lost, and it is called again
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'row', ARGV[2])
end
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'evaluation', ARGV[4]) end
"""
    + _TRAINER_REPLY
)

# --- an actor, while it has its lease -----------------------------------------------------------------------------

# KEYS[1] is actors, ARGV: the task's key, token, worker. An actor whose place nobody has takes it again: a server that
# came back has lost it.
_ACTOR_FENCE = (
    _LUA
    + """
local task = redis.call('HMGET', ARGV[1], 'state', 'train_count', 'version', 'backlog_limit', 'actor_backlog',
  'received_bytes')
if not task[1] then return {'gone'} end
local lease = 'lease:' .. ARGV[3]
local place = redis.call('HMGET', KEYS[1], lease, 'sent_bytes', 'slots')
local slots = natural(place[3], MOST_SLOTS)
if not place[1] and not final(task[1]) then
  redis.call('HSET', KEYS[1], lease, ARGV[2])
  place[1] = ARGV[2]
  local slot = tonumber(ARGV[3]:match('%d+$'))
  if slot >= slots then redis.call('HSET', KEYS[1], 'slots', slot + 1) end
end
if place[1] ~= ARGV[2] then return {} end
if final(task[1]) then return {task[1]} end
local limit = math.max(tonumber(task[4]), tonumber(task[5]) * slots)
local sent_bytes = natural(place[2])
local waiting = sent_bytes - tonumber(task[6])
local room = limit - waiting
if waiting == 0 then room = math.huge end
local sent, rank, actors = 0, 0, 0
"""
)
_ACTOR_REPLY = "return {task[2], task[3], tostring(room), sent, rank, actors}"

# KEYS: actors, workers. ARGV: see above, status, and where the actor asks how many there are: the age of a heartbeat
# that still counts.
BEAT = (
    _ACTOR_FENCE
    + """
local ms = now_ms()
redis.call('HSET', KEYS[2], ARGV[3], ms .. ' ' .. ARGV[4])
if ARGV[5] ~= '' then
  local mine = tonumber(ARGV[3]:match('%d+$'))
  local beats = redis.call('HGETALL', KEYS[2])
  for i = 1, #beats, 2 do
    local slot = tonumber(beats[i]:match('^actor%-(%d+)$'))
    if slot and ms - beat_ms(beats[i + 1]) <= tonumber(ARGV[5]) then
      actors = actors + 1
      if slot < mine then rank = rank + 1 end
    end
  end
end
"""
    + _ACTOR_REPLY
)

# KEYS: actors, experience. ARGV: see above, message, its bytes unpacked, how many times the backlog's limit it may be
# above that.
SEND = (
    _ACTOR_FENCE
    + """
if tonumber(ARGV[5]) <= room + tonumber(ARGV[6]) * limit then
  redis.call('XADD', KEYS[2], '*', 'd', ARGV[4], 'w', ARGV[3])
  redis.call('HSET', KEYS[1], 'sent_bytes', string.format('%.0f', sent_bytes + tonumber(ARGV[5])))
  sent = 1
end
"""
    + _ACTOR_REPLY
)

# KEYS: task, quarantine. ARGV: token, sender, reason, the message's start, most messages.
QUARANTINE = (
    _TRAINER_FENCE
    + """
redis.call('XADD', KEYS[2], 'MAXLEN', '=', ARGV[5], '*', 'sender', ARGV[2], 'reason', ARGV[3], 'start', ARGV[4])
"""
    + _TRAINER_REPLY
)

ALL = (
    *(CREATE, RESTORE, ACQUIRE_TRAINER, ACQUIRE_ACTOR, RELEASE_TRAINER, RELEASE_ACTOR, FINISH, ASK_TO_END),
    *(ADD_ERROR, WATCH, COMMIT, STORE_CHECKPOINT, ADD_HISTORY, QUARANTINE, BEAT, SEND),
)
"""What a client or trainer loads into a server; actors may only run these."""
