-- Work queues; src/core/queue says what they must bear.
--
-- A message is one row, and "due" is from when it may be claimed: since its push, when it is to be
-- tried again, when its lease ends, or never ('infinity': behind another of its key, or a dead
-- letter). A claim is the first rows that are due, skipping those that others lock; nothing is
-- locked for the queue as a whole. "token" is that of the claim, 0 without one.
--
-- Only the first message of a key is ever due. Whoever pushes to a key, or removes its first
-- message, has the key's advisory lock until the end of its transaction, so that numbers are
-- committed in their order and the next one is seen by whoever must make it due. That rests on
-- seeing what was committed before the lock was had: READ COMMITTED.
--
-- The tables go from empty to full and back between two looks of the planner at them, which would
-- then read them whole: so that each function says that indexes are to be used, until its end, since
-- it may be a step of the user's own transaction. Where there is no index, that makes a plan look so
-- expensive that it is compiled, anew in each call: so that none is.

CREATE SEQUENCE IF NOT EXISTS @schema@.message_number;

-- Tokens begin at the time of day, so that a queue that was lost with its tables goes on above.
DO $$ BEGIN
  IF to_regclass('@schema@.queue_token') IS NULL THEN
    EXECUTE format('CREATE SEQUENCE @schema@.queue_token START %s', @schema@.least_token());
  END IF;
END $$;

CREATE TABLE IF NOT EXISTS @schema@.queue (
  id        int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  namespace text NOT NULL,
  name      text NOT NULL,
  UNIQUE (namespace, name)
);

CREATE TABLE IF NOT EXISTS @schema@.message (
  number   bigint PRIMARY KEY DEFAULT nextval('@schema@.message_number'),
  queue    int NOT NULL,
  due      timestamptz NOT NULL,
  token    bigint NOT NULL DEFAULT 0,
  ttl      bigint NOT NULL DEFAULT 0,                       -- of the claim, in microseconds
  attempts int NOT NULL DEFAULT 0,
  dead     boolean NOT NULL DEFAULT false,
  behind   boolean NOT NULL DEFAULT false,                  -- another of its key is first
  batch    uuid,                                            -- of the claim
  pushed   timestamptz NOT NULL DEFAULT clock_timestamp(),
  after    timestamptz NOT NULL,                            -- kept back until then by its sender
  key      text,
  id       text,
  owner    text,                                            -- of the claim, for people: JSON
  why      text,                                            -- it failed, for people
  body     bytea NOT NULL
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX IF NOT EXISTS message_due ON @schema@.message (queue, due);
CREATE INDEX IF NOT EXISTS message_key ON @schema@.message (queue, key, number) WHERE key IS NOT NULL;
-- What the advisory lock sees to, once more.
CREATE UNIQUE INDEX IF NOT EXISTS message_first ON @schema@.message (queue, key)
  WHERE key IS NOT NULL AND NOT behind;

-- The ids that were pushed.
CREATE TABLE IF NOT EXISTS @schema@.queue_seen (
  queue  int NOT NULL,
  id     text NOT NULL,
  number bigint NOT NULL,
  until  timestamptz NOT NULL,
  PRIMARY KEY (queue, id)
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX IF NOT EXISTS queue_seen_until ON @schema@.queue_seen (until);

-- Consumers that sleep: only they are notified, because a notification holds up the commits of
-- all others.
CREATE UNLOGGED TABLE IF NOT EXISTS @schema@.queue_sleeper (
  sleeper uuid PRIMARY KEY,
  queue   int NOT NULL,
  mailbox text NOT NULL,
  since   timestamptz NOT NULL
);
CREATE INDEX IF NOT EXISTS queue_sleeper_since ON @schema@.queue_sleeper (queue, since);
CREATE INDEX IF NOT EXISTS queue_sleeper_old ON @schema@.queue_sleeper (since);

-- The number of a queue, which is made if there is none.
CREATE OR REPLACE FUNCTION @schema@.queue_of(p_namespace text, p_name text)
RETURNS int LANGUAGE plpgsql AS $$
DECLARE
  q int;
BEGIN
  LOOP
    SELECT id INTO q FROM @schema@.queue WHERE namespace = p_namespace AND name = p_name;
    IF FOUND THEN
      RETURN q;
    END IF;
    INSERT INTO @schema@.queue (namespace, name) VALUES (p_namespace, p_name) ON CONFLICT DO NOTHING;
  END LOOP;
END $$;

-- Locks keys until the end of the transaction, in one order for all.
CREATE OR REPLACE FUNCTION @schema@.queue_lock(p_queue int, p_keys text[])
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  h int;
BEGIN
  FOR h IN SELECT DISTINCT hashtext(p_queue || ' ' || k) FROM unnest(p_keys) AS k
            WHERE k IS NOT NULL ORDER BY 1 LOOP
    IF current_setting('transaction_isolation') <> 'read committed' THEN
      RAISE EXCEPTION 'messages with a key are pushed and done in READ COMMITTED'
        USING ERRCODE = 'feature_not_supported';
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('palisade queue @schema@'), h);
  END LOOP;
END $$;

-- Wakes as many consumers as there are messages, those first that fell asleep last: they live.
CREATE OR REPLACE FUNCTION @schema@.queue_wake(p_queue int, p_count bigint)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  s record;
BEGIN
  FOR s IN
    DELETE FROM @schema@.queue_sleeper WHERE sleeper = ANY (ARRAY(
      SELECT sleeper FROM @schema@.queue_sleeper
       WHERE queue = p_queue AND since > statement_timestamp() - interval '15 seconds'
       ORDER BY since DESC LIMIT p_count FOR UPDATE SKIP LOCKED))
    RETURNING sleeper, mailbox
  LOOP
    PERFORM pg_notify(s.mailbox, 'g' || s.sleeper);
  END LOOP;
END $$;

-- Lets the next of each key come first, and wakes consumers for those that are due. The keys are
-- locked.
CREATE OR REPLACE FUNCTION @schema@.queue_promote(p_queue int, p_keys text[])
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  n bigint;
BEGIN
  WITH next AS (
    UPDATE @schema@.message m SET behind = false, due = greatest(m.after, clock_timestamp())
     WHERE m.number = ANY (ARRAY(
       SELECT (SELECT min(f.number) FROM @schema@.message f WHERE f.queue = p_queue AND f.key = k)
         FROM (SELECT DISTINCT x FROM unnest(p_keys) AS x) AS keys (k)))
       AND m.behind
    RETURNING m.after
  )
  SELECT count(*) INTO n FROM next WHERE after <= clock_timestamp();
  IF n > 0 THEN
    PERFORM @schema@.queue_wake(p_queue, n);
  END IF;
END $$;

-- Adds messages in their order: the number of each, and whether it was there before.
CREATE OR REPLACE FUNCTION @schema@.queue_push(
  p_namespace text, p_name text, p_ids text[], p_keys text[], p_delays bigint[], p_bodies bytea[],
  p_remembered bigint
) RETURNS TABLE (number bigint, duplicate boolean) LANGUAGE plpgsql SET jit = off SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
  q     int;
  n     bigint;
  at    timestamptz;
  first boolean;
  awake bigint := 0;
BEGIN
  PERFORM @schema@.durable();
  q := @schema@.queue_of(p_namespace, p_name);
  IF array_length(array_remove(p_keys, NULL), 1) IS NULL
     AND array_length(array_remove(p_ids, NULL), 1) IS NULL THEN
    at := clock_timestamp();
    RETURN QUERY INSERT INTO @schema@.message (queue, due, after, body)
      SELECT q, at + d.delay * interval '1 microsecond', at + d.delay * interval '1 microsecond', d.body
        FROM unnest(p_delays, p_bodies) AS d (delay, body)
      RETURNING message.number, false;
    SELECT count(*) INTO awake FROM unnest(p_delays) AS delay WHERE delay = 0;
  ELSE
    PERFORM @schema@.queue_lock(q, p_keys);
    at := clock_timestamp();
    FOR i IN 1 .. cardinality(p_bodies) LOOP
      n := nextval('@schema@.message_number');
      IF p_ids[i] IS NOT NULL THEN
        INSERT INTO @schema@.queue_seen AS s (queue, id, number, until)
          VALUES (q, p_ids[i], n, at + p_remembered * interval '1 microsecond')
          ON CONFLICT (queue, id) DO UPDATE SET number = excluded.number, until = excluded.until
          WHERE s.until < at
            AND NOT EXISTS (SELECT FROM @schema@.message m WHERE m.number = s.number);
        IF NOT FOUND THEN
          SELECT s.number INTO n FROM @schema@.queue_seen s WHERE s.queue = q AND s.id = p_ids[i];
          RETURN QUERY SELECT n, true;
          CONTINUE;
        END IF;
      END IF;
      first := p_keys[i] IS NULL OR NOT EXISTS (
        SELECT FROM @schema@.message m WHERE m.queue = q AND m.key = p_keys[i]);
      INSERT INTO @schema@.message (number, queue, due, behind, after, key, id, body)
        VALUES (n, q,
          CASE WHEN first THEN at + p_delays[i] * interval '1 microsecond' ELSE 'infinity' END,
          NOT first, at + p_delays[i] * interval '1 microsecond', p_keys[i], p_ids[i], p_bodies[i]);
      IF first AND p_delays[i] = 0 THEN
        awake := awake + 1;
      END IF;
      RETURN QUERY SELECT n, false;
    END LOOP;
    DELETE FROM @schema@.queue_seen WHERE ctid = ANY (ARRAY(
      SELECT s.ctid FROM @schema@.queue_seen s WHERE s.until < at
         AND NOT EXISTS (SELECT FROM @schema@.message m WHERE m.number = s.number)
       ORDER BY s.until LIMIT 2 * cardinality(p_bodies) FOR UPDATE SKIP LOCKED));
  END IF;
  IF awake > 0 THEN
    PERFORM @schema@.queue_wake(q, awake);
  END IF;
END $$;

-- Lets a claim and its end, which may overtake it, come one after the other.
CREATE OR REPLACE FUNCTION @schema@.queue_turn(p_batch uuid) RETURNS void LANGUAGE sql AS $$
  SELECT pg_advisory_xact_lock(hashtext('palisade claim @schema@'), hashtext(p_batch::text))
$$;

-- Claims the first messages that are due. What was claimed as often as allowed, and had no end,
-- becomes a dead letter and is told as such. "Again" answers with what this batch has claimed.
CREATE OR REPLACE FUNCTION @schema@.queue_claim(
  p_namespace text, p_name text, p_batch uuid, p_again boolean, p_count int, p_ttl bigint,
  p_attempts int, p_owner text
) RETURNS TABLE (number bigint, id text, key text, token bigint, attempts int, body bytea, dead boolean)
LANGUAGE plpgsql SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
#variable_conflict use_column
DECLARE
  q int;
BEGIN
  PERFORM @schema@.durable();
  PERFORM @schema@.queue_turn(p_batch);
  SELECT queue.id INTO q FROM @schema@.queue WHERE namespace = p_namespace AND name = p_name;
  IF p_again THEN
    RETURN QUERY UPDATE @schema@.message m
       SET due = clock_timestamp() + m.ttl * interval '1 microsecond'
     WHERE m.queue = q AND m.due > statement_timestamp() AND m.due < 'infinity'
       AND m.batch = p_batch AND m.token > 0
    RETURNING m.number, m.id, m.key, m.token, m.attempts, m.body, m.dead;
    IF FOUND THEN
      RETURN;
    END IF;
  END IF;
  IF EXISTS (SELECT FROM @schema@.departed WHERE claim = p_batch) THEN
    RETURN;
  END IF;
  -- The time of the statement, which an index can be searched by, and which is not too late.
  RETURN QUERY UPDATE @schema@.message m
     SET due = CASE WHEN m.attempts >= p_attempts THEN 'infinity'
               ELSE clock_timestamp() + p_ttl * interval '1 microsecond' END,
         token = CASE WHEN m.attempts >= p_attempts THEN 0 ELSE nextval('@schema@.queue_token') END,
         dead = m.attempts >= p_attempts,
         why = CASE WHEN m.attempts >= p_attempts THEN
               coalesce(m.why || '; ', '') || 'its last consumer was lost' ELSE m.why END,
         attempts = least(m.attempts + 1, p_attempts),
         ttl = p_ttl, batch = p_batch, owner = p_owner
   WHERE m.number = ANY (ARRAY(
     SELECT f.number FROM @schema@.message f WHERE f.queue = q AND f.due <= statement_timestamp()
      ORDER BY f.due LIMIT p_count FOR UPDATE SKIP LOCKED))
  RETURNING m.number, m.id, m.key, m.token, m.attempts, m.body, m.dead;
END $$;

-- Renews claims: the ttl of each in microseconds, 0 when it is over, -1 when its row is locked,
-- by a transaction that is about to end it.
CREATE OR REPLACE FUNCTION @schema@.queue_renew(p_numbers bigint[], p_tokens bigint[])
RETURNS bigint[] LANGUAGE plpgsql SET jit = off SET enable_seqscan = off AS $$
DECLARE
  answer bigint[];
BEGIN
  WITH free AS MATERIALIZED (
    SELECT m.number FROM @schema@.message m
      JOIN unnest(p_numbers, p_tokens) AS r (number, token) ON r.number = m.number AND r.token = m.token
     WHERE m.due > clock_timestamp() FOR UPDATE OF m SKIP LOCKED
  ), renewed AS (
    UPDATE @schema@.message m SET due = clock_timestamp() + m.ttl * interval '1 microsecond'
     WHERE m.number = ANY (ARRAY(SELECT number FROM free)) RETURNING m.number, m.ttl
  )
  SELECT array_agg(coalesce(renewed.ttl, CASE WHEN EXISTS (
      SELECT FROM @schema@.message m
       WHERE m.number = r.number AND m.token = r.token AND m.due > clock_timestamp()) THEN -1 ELSE 0 END)
      ORDER BY r.place)
    INTO answer
    FROM unnest(p_numbers, p_tokens) WITH ORDINALITY AS r (number, token, place)
    LEFT JOIN renewed ON renewed.number = r.number;
  RETURN answer;
END $$;

-- Removes messages that are done; answers their numbers.
CREATE OR REPLACE FUNCTION @schema@.queue_done(p_numbers bigint[], p_tokens bigint[], p_keyed boolean)
RETURNS bigint[] LANGUAGE plpgsql SET jit = off SET enable_seqscan = off AS $$
DECLARE
  q    int;
  keys text[];
  done bigint[];
BEGIN
  PERFORM @schema@.durable();
  IF p_keyed THEN
    SELECT min(m.queue), array_agg(DISTINCT m.key) INTO q, keys
      FROM @schema@.message m WHERE m.number = ANY (p_numbers) AND m.key IS NOT NULL;
    PERFORM @schema@.queue_lock(q, keys);
  END IF;
  WITH gone AS (
    DELETE FROM @schema@.message m USING unnest(p_numbers, p_tokens) AS d (number, token)
     WHERE m.number = d.number AND m.token = d.token RETURNING m.number
  )
  SELECT coalesce(array_agg(number), '{}') INTO done FROM gone;
  IF p_keyed THEN
    PERFORM @schema@.queue_promote(q, keys);
  END IF;
  RETURN done;
END $$;

-- The same for one message in a transaction of the user's, which must not go on without it.
CREATE OR REPLACE FUNCTION @schema@.queue_done_or_fail(p_number bigint, p_token bigint)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF @schema@.queue_done(ARRAY[p_number], ARRAY[p_token], true) = '{}' THEN
    RAISE EXCEPTION 'the message was lost to another consumer' USING ERRCODE = 'PFQ01';
  END IF;
END $$;

-- Ends claims whose messages stay; answers their numbers. "After" in microseconds, or NULL for a
-- dead letter; with "p_untried" the claim does not count, and the message has its place again.
CREATE OR REPLACE FUNCTION @schema@.queue_return(
  p_numbers bigint[], p_tokens bigint[], p_after bigint, p_untried boolean, p_why text
) RETURNS bigint[] LANGUAGE plpgsql SET jit = off SET enable_seqscan = off AS $$
DECLARE
  q    int;
  done bigint[];
BEGIN
  PERFORM @schema@.durable();
  WITH back AS (
    UPDATE @schema@.message m
       SET token = 0, batch = NULL, owner = NULL,
           dead = p_after IS NULL,
           due = CASE WHEN p_untried THEN m.after WHEN p_after IS NULL THEN 'infinity'
                 ELSE clock_timestamp() + p_after * interval '1 microsecond' END,
           attempts = m.attempts - CASE WHEN p_untried THEN 1 ELSE 0 END,
           why = coalesce(p_why, m.why)
      FROM unnest(p_numbers, p_tokens) AS d (number, token)
     WHERE m.number = d.number AND m.token = d.token RETURNING m.number, m.queue
  )
  SELECT coalesce(array_agg(number), '{}'), min(queue) INTO done, q FROM back;
  IF p_after = 0 AND done <> '{}' THEN
    PERFORM @schema@.queue_wake(q, cardinality(done));
  END IF;
  RETURN done;
END $$;

-- Gives back what a claim took that was given up; if that is not there, the claim may still come.
CREATE OR REPLACE FUNCTION @schema@.queue_leave(p_namespace text, p_name text, p_batch uuid)
RETURNS bigint[] LANGUAGE plpgsql SET jit = off SET enable_seqscan = off AS $$
DECLARE
  q int;
  n bigint;
BEGIN
  PERFORM @schema@.queue_turn(p_batch);
  SELECT id INTO q FROM @schema@.queue WHERE namespace = p_namespace AND name = p_name;
  WITH back AS (
    UPDATE @schema@.message m
       SET token = 0, batch = NULL, owner = NULL, due = m.after, attempts = m.attempts - 1
     WHERE m.queue = q AND m.due > statement_timestamp() AND m.due < 'infinity'
       AND m.batch = p_batch AND m.token > 0 RETURNING 1
  )
  SELECT count(*) INTO n FROM back;
  -- What it has not brought yet may come.
  PERFORM @schema@.depart(p_batch, clock_timestamp());
  IF n > 0 THEN
    PERFORM @schema@.queue_wake(q, n);
  END IF;
  RETURN ARRAY[n];
END $$;

-- Gives a claim another ttl: {1} done, {0} it is over.
CREATE OR REPLACE FUNCTION @schema@.queue_extend(p_number bigint, p_token bigint, p_ttl bigint)
RETURNS bigint[] LANGUAGE plpgsql SET jit = off SET enable_seqscan = off AS $$
BEGIN
  UPDATE @schema@.message m
     SET ttl = p_ttl, due = greatest(m.due, clock_timestamp() + p_ttl * interval '1 microsecond')
   WHERE m.number = p_number AND m.token = p_token AND m.due > clock_timestamp();
  RETURN ARRAY[CASE WHEN FOUND THEN 1 ELSE 0 END::bigint];
END $$;

-- Says that a consumer sleeps: it is told of the next message, once. It does so under a new name
-- each time, since the row of the last one may be locked by a push that takes its time. Answers in
-- how many microseconds the next message is due that is there already, if any is.
CREATE OR REPLACE FUNCTION @schema@.queue_sleep(
  p_namespace text, p_name text, p_sleeper uuid, p_before uuid, p_mailbox text
) RETURNS bigint[] LANGUAGE plpgsql SET jit = off SET enable_seqscan = off SET enable_sort = off AS $$
DECLARE
  q    int := @schema@.queue_of(p_namespace, p_name);
  next timestamptz;
BEGIN
  INSERT INTO @schema@.queue_sleeper (sleeper, queue, mailbox, since)
    VALUES (p_sleeper, q, p_mailbox, clock_timestamp());
  DELETE FROM @schema@.queue_sleeper WHERE sleeper = ANY (ARRAY(
    SELECT sleeper FROM @schema@.queue_sleeper WHERE sleeper = p_before FOR UPDATE SKIP LOCKED));
  DELETE FROM @schema@.queue_sleeper WHERE sleeper = ANY (ARRAY(
    SELECT sleeper FROM @schema@.queue_sleeper
     WHERE since < statement_timestamp() - interval '1 minute'
     ORDER BY since LIMIT 8 FOR UPDATE SKIP LOCKED));
  SELECT m.due INTO next FROM @schema@.message m WHERE m.queue = q AND m.due < 'infinity'
   ORDER BY m.due LIMIT 1;
  IF next IS NULL THEN
    RETURN '{}';
  END IF;
  RETURN ARRAY[greatest(0, extract(epoch FROM next - clock_timestamp()) * 1000000)::bigint];
END $$;

-- The numbers of the messages that an operator means: one by its id, dead letters, or all.
CREATE OR REPLACE FUNCTION @schema@.queue_pick(p_queue int, p_pick text, p_number bigint, p_id text)
RETURNS SETOF bigint LANGUAGE plpgsql SET jit = off SET enable_seqscan = off AS $$
BEGIN
  IF p_pick = 'all' THEN
    RETURN QUERY SELECT m.number FROM @schema@.message m WHERE m.queue = p_queue;
  ELSIF p_pick = 'dead' THEN
    RETURN QUERY SELECT m.number FROM @schema@.message m
      WHERE m.queue = p_queue AND m.due = 'infinity' AND m.dead;
  ELSE
    RETURN QUERY SELECT m.number FROM @schema@.message m
      WHERE m.queue = p_queue AND m.number = coalesce(p_number,
        (SELECT s.number FROM @schema@.queue_seen s WHERE s.queue = p_queue AND s.id = p_id));
  END IF;
END $$;

-- Makes messages ready that are neither claimed nor behind another; answers how many.
CREATE OR REPLACE FUNCTION @schema@.queue_retry(
  p_namespace text, p_name text, p_pick text, p_number bigint, p_id text
) RETURNS bigint[] LANGUAGE plpgsql SET jit = off SET enable_seqscan = off AS $$
DECLARE
  q int;
  n bigint;
BEGIN
  PERFORM @schema@.durable();
  SELECT id INTO q FROM @schema@.queue WHERE namespace = p_namespace AND name = p_name;
  WITH back AS (
    UPDATE @schema@.message m
       SET dead = false, attempts = 0, token = 0, batch = NULL, owner = NULL, due = clock_timestamp(),
           after = least(m.after, clock_timestamp())
     WHERE m.number IN (SELECT @schema@.queue_pick(q, p_pick, p_number, p_id))
       AND NOT m.behind AND (m.token = 0 OR m.due <= clock_timestamp())
    RETURNING 1
  )
  SELECT count(*) INTO n FROM back;
  IF n > 0 THEN
    PERFORM @schema@.queue_wake(q, n);
  END IF;
  RETURN ARRAY[n];
END $$;

-- Removes some messages and forgets their ids, claimed ones only by force; answers how many.
CREATE OR REPLACE FUNCTION @schema@.queue_discard(
  p_namespace text, p_name text, p_pick text, p_number bigint, p_id text, p_force boolean
) RETURNS bigint[] LANGUAGE plpgsql SET jit = off SET enable_seqscan = off AS $$
DECLARE
  q       int;
  numbers bigint[];
  keys    text[];
  n       bigint;
BEGIN
  PERFORM @schema@.durable();
  SELECT id INTO q FROM @schema@.queue WHERE namespace = p_namespace AND name = p_name;
  SELECT array_agg(m.number), array_agg(DISTINCT m.key) INTO numbers, keys FROM @schema@.message m
   WHERE m.number IN (
     SELECT f.number FROM @schema@.message f
      WHERE f.number IN (SELECT @schema@.queue_pick(q, p_pick, p_number, p_id))
        AND (p_force OR f.token = 0 OR f.due <= clock_timestamp())
      ORDER BY f.number LIMIT 500);
  PERFORM @schema@.queue_lock(q, keys);
  WITH gone AS (
    DELETE FROM @schema@.message m WHERE m.number = ANY (numbers)
       AND (p_force OR m.token = 0 OR m.due <= clock_timestamp()) RETURNING m.id
  ), unseen AS (
    DELETE FROM @schema@.queue_seen s USING gone WHERE s.queue = q AND s.id = gone.id
  )
  SELECT count(*) INTO n FROM gone;
  PERFORM @schema@.queue_promote(q, keys);
  RETURN ARRAY[n];
END $$;
