-- The tables and functions of postgres://, version @version@, revision @revision@.
--
-- Only ever add to it: clients of an earlier revision go on calling what is here now. A change
-- that they could not live with raises the version, which they refuse.
--
-- A line is one row, and everything that decides it is inside that row. A statement that waits
-- for a row reads that row again and nothing else (READ COMMITTED), so that a decision which
-- rested on other rows could be made from an old view of them. Only the claims that were left
-- before they arrived are kept apart; "doubt" in the row says that there may be some, and they
-- are looked up by a later statement, which sees what was committed before the row was had.
--
-- Changing a row in place touches no index: old versions are removed by whoever comes next.

BEGIN;

SELECT pg_advisory_xact_lock(hashtextextended('palisade schema @schema@', 0));

CREATE SCHEMA IF NOT EXISTS @schema@;

-- Clients that are at work lock a line before anything else: so does whoever upgrades beside them.
DO $$ BEGIN
  IF to_regclass('@schema@.line') IS NOT NULL THEN
    LOCK TABLE @schema@.line IN ACCESS EXCLUSIVE MODE;
  END IF;
END $$;

DO $$ BEGIN
  CREATE TYPE @schema@.seat AS (
    claim    uuid,
    weight   bigint,       -- of the capacity; 0 with capacity 0 is the whole line
    capacity bigint,
    counted  bigint,       -- the fencing token; 0 while it waits
    expires  timestamptz,
    ttl      bigint,       -- in microseconds
    evicted  boolean,
    mailbox  text,         -- the channel on which its client listens
    owner    text,         -- for people: JSON
    value    text          -- what a candidate stands for
  );
EXCEPTION WHEN duplicate_object THEN NULL;
END $$;

-- The name is compared by its bytes in line_prefix, whatever the database's collation is.
CREATE TABLE IF NOT EXISTS @schema@.line (
  namespace text NOT NULL,
  name      text NOT NULL,
  token     bigint NOT NULL,                              -- the last one that was granted
  used      timestamptz NOT NULL DEFAULT clock_timestamp(),
  doubt     timestamptz NOT NULL DEFAULT '-infinity',     -- until when "departed" has claims of it
  seats     @schema@.seat[] NOT NULL DEFAULT '{}',        -- holders, then waiters
  PRIMARY KEY (namespace, name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX IF NOT EXISTS line_prefix ON @schema@.line (namespace, name text_pattern_ops);

-- Claims that were left before they arrived.
CREATE TABLE IF NOT EXISTS @schema@.departed (
  claim uuid PRIMARY KEY,
  until timestamptz NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX IF NOT EXISTS departed_until ON @schema@.departed (until);

-- The greatest token of all lines that were removed: a line that comes back starts above it.
CREATE TABLE IF NOT EXISTS @schema@.floor (
  one   boolean PRIMARY KEY DEFAULT true CHECK (one),
  token bigint NOT NULL
);
INSERT INTO @schema@.floor (token) VALUES (0) ON CONFLICT DO NOTHING;

-- The tokens of postgres+advisory://.
CREATE SEQUENCE IF NOT EXISTS @schema@.token;

-- Who has an advisory lock, for people: one row per session, true only while that session lives
-- and has the lock. Nothing is decided by it.
CREATE UNLOGGED TABLE IF NOT EXISTS @schema@.session (
  pid       int PRIMARY KEY,
  claim     text NOT NULL,
  namespace text NOT NULL,
  name      text NOT NULL,
  ttl       bigint NOT NULL,
  owner     text NOT NULL,
  value     text
) WITH (fillfactor = 50);

-- A grant that was told must survive a crash. The setting counts when the transaction commits,
-- so that one on the function would be gone by then.
CREATE OR REPLACE FUNCTION @schema@.durable() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') THEN
    PERFORM set_config('synchronous_commit', 'on', true);
  END IF;
END $$;

-- What every verb begins with that is a transaction of its own. A session keeps its plans, also
-- those that were made while a table had one page: it would read thousands of lines to find one.
-- Every table has the index that is needed, and no plan is worth being compiled. A session of ours
-- says so itself, once; setting it here is for poolers' sessions, and for earlier clients.
CREATE OR REPLACE FUNCTION @schema@.verb() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM @schema@.durable();
  IF current_setting('enable_seqscan')::boolean THEN
    PERFORM set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true);
  END IF;
END $$;

-- The least token to grant now: a line whose row was deleted goes on above its former tokens.
CREATE OR REPLACE FUNCTION @schema@.least_token() RETURNS bigint LANGUAGE sql AS
  'SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint';

-- Remembers for five minutes that a claim was left, and forgets some others.
CREATE OR REPLACE FUNCTION @schema@.depart(p_claim uuid, at timestamptz)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO @schema@.departed (claim, until) VALUES (p_claim, at + interval '5 minutes')
    ON CONFLICT (claim) DO UPDATE SET until = excluded.until;
  DELETE FROM @schema@.departed WHERE claim = ANY (ARRAY(
    SELECT claim FROM @schema@.departed WHERE until < at ORDER BY until LIMIT 8
    FOR UPDATE SKIP LOCKED));
END $$;

-- Removes some lines that nobody has used for a day: those in a few blocks, chosen at random, so
-- that it costs the same however many there are.
CREATE OR REPLACE FUNCTION @schema@.sweep() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  blocks bigint := pg_relation_size('@schema@.line') / current_setting('block_size')::bigint;
  start  bigint := floor(random() * blocks);
  top    bigint;
BEGIN
  WITH idle AS (
    SELECT ctid FROM @schema@.line
     WHERE ctid >= format('(%s,0)', start)::tid AND ctid < format('(%s,0)', start + 16)::tid
       AND cardinality(seats) = 0 AND doubt < clock_timestamp()
       AND used < clock_timestamp() - interval '1 day'
     LIMIT 500 FOR UPDATE SKIP LOCKED
  ), gone AS (
    DELETE FROM @schema@.line WHERE ctid = ANY (ARRAY(SELECT ctid FROM idle)) RETURNING token
  )
  SELECT max(token) INTO top FROM gone;
  IF top IS NOT NULL THEN
    UPDATE @schema@.floor SET token = greatest(token, top) WHERE one;
  END IF;
END $$;

-- Locks the row of a line, and makes it if there is none.
CREATE OR REPLACE FUNCTION @schema@.grasp(p_namespace text, p_name text)
RETURNS @schema@.line LANGUAGE plpgsql AS $$
DECLARE
  l @schema@.line;
BEGIN
  LOOP
    SELECT * INTO l FROM @schema@.line
     WHERE namespace = p_namespace AND name = p_name FOR UPDATE;
    IF FOUND THEN
      RETURN l;
    END IF;
    IF random() < 1.0 / 32 THEN
      PERFORM @schema@.sweep();
    END IF;
    INSERT INTO @schema@.line (namespace, name, token) VALUES (p_namespace, p_name, 0)
      ON CONFLICT DO NOTHING;
    IF FOUND THEN
      -- A later statement: if the row was removed just now, the floor has its token.
      UPDATE @schema@.line SET token = greatest(line.token, floor.token) FROM @schema@.floor
       WHERE namespace = p_namespace AND name = p_name AND floor.one RETURNING line.* INTO l;
      RETURN l;
    END IF;
  END LOOP;
END $$;

-- Removes what has expired and grants what has come to the front: held iff the weights of all
-- ahead, waiting ones included, plus its own fit. Tells the new holders but "me", so that
-- whoever calls it must "put" the line.
CREATE OR REPLACE FUNCTION @schema@.settle(INOUT l @schema@.line, at timestamptz, me uuid)
LANGUAGE plpgsql AS $$
DECLARE
  s     @schema@.seat;
  seats @schema@.seat[] := '{}';
  room  bigint;
  taken bigint := 0;
  token bigint := l.token;
  lowest bigint := @schema@.least_token();
BEGIN
  FOREACH s IN ARRAY l.seats LOOP
    IF s.expires > at THEN
      seats := seats || s;
      IF room IS NULL AND s.capacity > 0 THEN
        room := s.capacity;
      END IF;
    END IF;
  END LOOP;
  room := coalesce(room, 1);
  FOR i IN 1 .. cardinality(seats) LOOP
    s := seats[i];
    taken := taken + CASE WHEN s.capacity = 0 THEN room ELSE s.weight END;
    CONTINUE WHEN s.counted > 0;
    EXIT WHEN taken > room;
    token := greatest(token + 1, lowest);
    s.counted := token;
    seats[i] := s;
    IF s.claim IS DISTINCT FROM me THEN
      PERFORM pg_notify(s.mailbox, 'g' || s.claim || ' ' || token);
    END IF;
  END LOOP;
  l.seats := seats;
  l.token := token;
END $$;

CREATE OR REPLACE FUNCTION @schema@.put(l @schema@.line) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  UPDATE @schema@.line SET token = l.token, used = clock_timestamp(), doubt = l.doubt, seats = l.seats
   WHERE namespace = l.namespace AND name = l.name;
END $$;

-- Takes a place. Answers {0} busy, {1, token, µs left}, {2, 0, µs left} waiting,
-- {3, capacity} in use with another capacity.
CREATE OR REPLACE FUNCTION @schema@.enter(
  p_namespace text, p_name text, p_claim uuid, p_weight bigint, p_capacity bigint,
  p_ttl bigint, p_queue boolean, p_mailbox text, p_owner text, p_value text
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  l     @schema@.line;
  s     @schema@.seat;
  at    timestamptz;
  known boolean := false;
  i     int := 0;
  n     bigint := @schema@.least_token();
BEGIN
  PERFORM @schema@.verb();
  -- A free line, which is nearly all of them: one statement that decides by the row alone.
  UPDATE @schema@.line
     SET token = greatest(token + 1, n), used = clock_timestamp(),
         seats = ARRAY[ROW(p_claim, p_weight, p_capacity, greatest(token + 1, n),
           clock_timestamp() + p_ttl * interval '1 microsecond', p_ttl, false,
           p_mailbox, p_owner, p_value)::@schema@.seat]
   WHERE namespace = p_namespace AND name = p_name AND cardinality(seats) = 0 AND doubt < clock_timestamp()
  RETURNING token INTO n;
  IF FOUND THEN
    RETURN ARRAY[1, n, p_ttl];
  END IF;

  l := @schema@.grasp(p_namespace, p_name);
  at := clock_timestamp();
  IF l.doubt > at THEN
    PERFORM FROM @schema@.departed WHERE claim = p_claim AND until > at;
    IF FOUND THEN
      RETURN ARRAY[0::bigint];
    END IF;
  END IF;
  FOREACH s IN ARRAY l.seats LOOP
    CONTINUE WHEN s.expires <= at;
    IF s.claim = p_claim THEN
      known := true;
    ELSIF p_capacity > 0 AND s.capacity > 0 AND s.capacity <> p_capacity THEN
      RETURN ARRAY[3, s.capacity];
    END IF;
  END LOOP;
  IF NOT known THEN
    l.seats := l.seats || ROW(p_claim, p_weight, p_capacity, 0,
      at + p_ttl * interval '1 microsecond', p_ttl, false,
      p_mailbox, p_owner, p_value)::@schema@.seat;
  END IF;
  l := @schema@.settle(l, at, p_claim);
  FOREACH s IN ARRAY l.seats LOOP
    i := i + 1;
    IF s.claim = p_claim THEN
      IF s.counted = 0 AND NOT p_queue THEN
        l.seats := l.seats[: i - 1] || l.seats[i + 1 :];
        PERFORM @schema@.put(l);
        RETURN ARRAY[0::bigint];
      END IF;
      PERFORM @schema@.put(l);
      n := extract(epoch FROM s.expires - at) * 1000000;
      RETURN ARRAY[CASE WHEN s.counted > 0 THEN 1 ELSE 2 END, s.counted, n];
    END IF;
  END LOOP;
  PERFORM @schema@.put(l);
  RETURN ARRAY[0::bigint];
END $$;

-- Says where a claim stands: {0} gone, {1, token}, {2, µs until a lease ahead of it is due, the
-- line's last token}.
CREATE OR REPLACE FUNCTION @schema@.place(p_namespace text, p_name text, p_claim uuid)
RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  l     @schema@.line;
  s     @schema@.seat;
  at    timestamptz;
  due   timestamptz;
  stale boolean;
BEGIN
  PERFORM @schema@.verb();
  SELECT * INTO l FROM @schema@.line WHERE namespace = p_namespace AND name = p_name;
  FOR round IN 1 .. 2 LOOP
    due := 'infinity';
    stale := false;
    at := clock_timestamp();
    FOREACH s IN ARRAY coalesce(l.seats, '{}') LOOP
      IF s.claim = p_claim AND s.expires > at THEN
        IF s.counted > 0 THEN
          RETURN ARRAY[1, s.counted];
        END IF;
        IF stale THEN
          EXIT;
        END IF;
        RETURN ARRAY[2,
          greatest(0, extract(epoch FROM least(due, at + interval '1 hour') - at) * 1000000)::bigint,
          l.token];
      END IF;
      stale := stale OR s.expires <= at;
      -- The one just ahead while that one waits, else every holder.
      due := CASE WHEN s.counted = 0 THEN s.expires ELSE least(due, s.expires) END;
    END LOOP;
    IF NOT stale OR round = 2 THEN
      RETURN ARRAY[0::bigint];
    END IF;
    -- A lease ahead has ended: a place is decided by a write.
    SELECT * INTO l FROM @schema@.line
     WHERE namespace = p_namespace AND name = p_name FOR UPDATE;
    IF NOT FOUND THEN
      RETURN ARRAY[0::bigint];
    END IF;
    l := @schema@.settle(l, clock_timestamp(), p_claim);
    PERFORM @schema@.put(l);
  END LOOP;
END $$;

-- Renews many: for each its ttl in µs, 0 lost, -1 evicted, -2 not known because another
-- transaction has locked its line's row. Each row is read once and written once. Rows are locked
-- in the order of their names, and with p_patience 0 none is waited for; else for so many ms.
CREATE OR REPLACE FUNCTION @schema@.renew(
  p_namespace text, p_names text[], p_claims uuid[], p_counts bigint[], p_patience int
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  answers bigint[] := array_fill(0::bigint, ARRAY[cardinality(p_names)]);
  asked   record;
  l       @schema@.line;
  s       @schema@.seat;
  seats   @schema@.seat[];
  at      timestamptz;
  i       int;
  o       int;
  changed boolean;
BEGIN
  PERFORM @schema@.verb();
  IF p_patience > 0 THEN
    PERFORM set_config('lock_timeout', p_patience::text, true);
  END IF;
  FOR asked IN
    SELECT u.name, array_agg(u.claim) AS claims, array_agg(u.place::int) AS places
      FROM unnest(p_names, p_claims) WITH ORDINALITY AS u (name, claim, place)
     GROUP BY u.name ORDER BY u.name
  LOOP
    IF p_patience > 0 THEN
      SELECT * INTO l FROM @schema@.line
       WHERE namespace = p_namespace AND name = asked.name FOR UPDATE;
    ELSE
      SELECT * INTO l FROM @schema@.line
       WHERE namespace = p_namespace AND name = asked.name FOR UPDATE SKIP LOCKED;
    END IF;
    IF NOT FOUND THEN
      PERFORM FROM @schema@.line WHERE namespace = p_namespace AND name = asked.name;
      IF FOUND THEN
        FOREACH o IN ARRAY asked.places LOOP
          answers[o] := -2;
        END LOOP;
      END IF;
      CONTINUE;
    END IF;
    at := clock_timestamp();
    seats := '{}';
    changed := false;
    FOREACH s IN ARRAY l.seats LOOP
      i := array_position(asked.claims, s.claim);
      IF i IS NOT NULL AND s.expires > at THEN
        o := asked.places[i];
        IF p_counts[o] > 0 AND s.counted <> p_counts[o] THEN
          NULL;
        ELSIF s.evicted THEN
          answers[o] := -1;
        ELSE
          s.expires := at + s.ttl * interval '1 microsecond';
          answers[o] := s.ttl;
          changed := true;
        END IF;
      END IF;
      seats := seats || s;
    END LOOP;
    IF changed THEN
      l.seats := seats;
      PERFORM @schema@.put(l);
    END IF;
  END LOOP;
  RETURN answers;
END $$;

-- The same for clients before revision 4, which know of no -2.
CREATE OR REPLACE FUNCTION @schema@.prolong(
  p_namespace text, p_names text[], p_claims uuid[], p_counts bigint[]
) RETURNS bigint[] LANGUAGE plpgsql AS $$
BEGIN
  RETURN @schema@.renew(p_namespace, p_names, p_claims, p_counts, 1500);
END $$;

-- Changes what a holder weighs (p_capacity not null) or says: {1} done, {2} busy, {0} gone.
CREATE OR REPLACE FUNCTION @schema@.amend(
  p_namespace text, p_name text, p_claim uuid, p_counted bigint,
  p_weight bigint, p_capacity bigint, p_value text
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  l       @schema@.line;
  s       @schema@.seat;
  at      timestamptz;
  mine    int;
  holders int := 0;
  others  boolean := false;
  i       int := 0;
BEGIN
  PERFORM @schema@.verb();
  SELECT * INTO l FROM @schema@.line WHERE namespace = p_namespace AND name = p_name FOR UPDATE;
  IF NOT FOUND THEN
    RETURN ARRAY[0::bigint];
  END IF;
  at := clock_timestamp();
  l := @schema@.settle(l, at, NULL);
  FOREACH s IN ARRAY l.seats LOOP
    i := i + 1;
    holders := holders + CASE WHEN s.counted > 0 THEN 1 ELSE 0 END;
    IF s.claim = p_claim THEN
      mine := i;
    ELSE
      others := others OR (s.capacity > 0 AND p_capacity > 0 AND s.capacity <> p_capacity);
    END IF;
  END LOOP;
  s := l.seats[mine];
  IF mine IS NULL OR s.counted = 0 OR s.counted <> p_counted THEN
    PERFORM @schema@.put(l);
    RETURN ARRAY[0::bigint];
  END IF;
  IF p_capacity IS NULL THEN
    s.value := p_value;
  ELSE
    IF others OR (holders > 1 AND s.capacity > 0
                  AND (p_capacity = 0 OR p_weight > s.weight)) THEN
      PERFORM @schema@.put(l);
      RETURN ARRAY[2::bigint];
    END IF;
    s.weight := p_weight;
    s.capacity := p_capacity;
  END IF;
  l.seats[mine] := s;
  PERFORM @schema@.put(@schema@.settle(l, at, NULL));
  RETURN ARRAY[1::bigint];
END $$;

-- Gives a place up: {1} done, {0} it was not there. What is not there and not counted, or in
-- doubt, is remembered for five minutes: its enter may still be under way.
CREATE OR REPLACE FUNCTION @schema@.leave(
  p_namespace text, p_name text, p_claim uuid, p_counted bigint, p_doubt boolean
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  l    @schema@.line;
  s    @schema@.seat;
  at   timestamptz;
  i    int := 0;
  n    bigint := 0;
BEGIN
  PERFORM @schema@.verb();
  IF NOT p_doubt THEN
    -- The only one in its line: one statement that decides by the row alone.
    UPDATE @schema@.line SET seats = '{}'
     WHERE namespace = p_namespace AND name = p_name AND cardinality(seats) = 1
       AND seats[1].claim = p_claim AND seats[1].expires > clock_timestamp()
       AND (p_counted = 0 OR seats[1].counted IN (0, p_counted));
    IF FOUND THEN
      RETURN ARRAY[1::bigint];
    END IF;
  END IF;

  IF p_counted = 0 OR p_doubt THEN
    l := @schema@.grasp(p_namespace, p_name);
  ELSE
    SELECT * INTO l FROM @schema@.line
     WHERE namespace = p_namespace AND name = p_name FOR UPDATE;
    IF NOT FOUND THEN
      RETURN ARRAY[0::bigint];
    END IF;
  END IF;
  at := clock_timestamp();
  FOREACH s IN ARRAY l.seats LOOP
    i := i + 1;
    IF s.claim = p_claim AND s.expires > at
       AND (p_counted = 0 OR s.counted IN (0, p_counted)) THEN
      l.seats := l.seats[: i - 1] || l.seats[i + 1 :];
      n := 1;
      EXIT;
    END IF;
  END LOOP;
  IF p_doubt OR (n = 0 AND p_counted = 0) THEN
    PERFORM @schema@.depart(p_claim, at);
    l.doubt := greatest(l.doubt, at + interval '5 minutes');
  ELSIF n = 0 THEN
    RETURN ARRAY[0::bigint];
  END IF;
  PERFORM @schema@.put(@schema@.settle(l, at, NULL));
  RETURN ARRAY[n];
END $$;

-- Takes a place away: marks it, or removes it. {1} done, {0} it was not there.
CREATE OR REPLACE FUNCTION @schema@.evict(
  p_namespace text, p_name text, p_claim uuid, p_remove boolean
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  l  @schema@.line;
  s  @schema@.seat;
  at timestamptz;
  i  int := 0;
BEGIN
  PERFORM @schema@.verb();
  SELECT * INTO l FROM @schema@.line WHERE namespace = p_namespace AND name = p_name FOR UPDATE;
  IF NOT FOUND THEN
    RETURN ARRAY[0::bigint];
  END IF;
  at := clock_timestamp();
  FOREACH s IN ARRAY l.seats LOOP
    i := i + 1;
    IF s.claim = p_claim AND s.expires > at THEN
      IF p_remove THEN
        l.seats := l.seats[: i - 1] || l.seats[i + 1 :];
        l := @schema@.settle(l, at, NULL);
        PERFORM pg_notify(s.mailbox, 'g' || s.claim);
      ELSE
        s.evicted := true;
        l.seats[i] := s;
      END IF;
      PERFORM @schema@.put(l);
      PERFORM pg_notify(s.mailbox, 'e' || s.claim);
      RETURN ARRAY[1::bigint];
    END IF;
  END LOOP;
  RETURN ARRAY[0::bigint];
END $$;

-- Gives a line of permits another capacity: {1} done, {0} no permits there, {2} readers
-- (capacity p_readers) are there, {3, weight} a claim is too heavy.
CREATE OR REPLACE FUNCTION @schema@.resize(
  p_namespace text, p_name text, p_capacity bigint, p_readers bigint
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  l     @schema@.line;
  s     @schema@.seat;
  seats @schema@.seat[] := '{}';
  at    timestamptz;
  parts boolean := false;
BEGIN
  PERFORM @schema@.verb();
  SELECT * INTO l FROM @schema@.line WHERE namespace = p_namespace AND name = p_name FOR UPDATE;
  IF NOT FOUND THEN
    RETURN ARRAY[0::bigint];
  END IF;
  at := clock_timestamp();
  FOREACH s IN ARRAY l.seats LOOP
    CONTINUE WHEN s.expires <= at;
    IF s.capacity = p_readers THEN
      RETURN ARRAY[2::bigint];
    ELSIF s.capacity > 0 AND s.weight > p_capacity THEN
      RETURN ARRAY[3, s.weight];
    ELSIF s.capacity > 0 THEN
      parts := true;
      s.capacity := p_capacity;
    END IF;
    seats := seats || s;
  END LOOP;
  IF NOT parts THEN
    RETURN ARRAY[0::bigint];
  END IF;
  l.seats := seats;
  PERFORM @schema@.put(@schema@.settle(l, at, NULL));
  RETURN ARRAY[1::bigint];
END $$;
