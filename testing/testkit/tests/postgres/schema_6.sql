-- The tables and functions of postgres://, version 3, revision 6.
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

SELECT pg_advisory_xact_lock(hashtextextended('palisade schema "palisade"', 0));

CREATE SCHEMA IF NOT EXISTS "palisade";

-- Clients that are at work lock a line before anything else: so does whoever upgrades beside them.
DO $$ BEGIN
  IF to_regclass('"palisade".line') IS NOT NULL THEN
    LOCK TABLE "palisade".line IN ACCESS EXCLUSIVE MODE;
  END IF;
END $$;

DO $$ BEGIN
  CREATE TYPE "palisade".seat AS (
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
CREATE TABLE IF NOT EXISTS "palisade".line (
  namespace text NOT NULL,
  name      text NOT NULL,
  token     bigint NOT NULL,                              -- the last one that was granted
  used      timestamptz NOT NULL DEFAULT clock_timestamp(),
  doubt     timestamptz NOT NULL DEFAULT '-infinity',     -- until when "departed" has claims of it
  seats     "palisade".seat[] NOT NULL DEFAULT '{}',        -- holders, then waiters
  PRIMARY KEY (namespace, name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX IF NOT EXISTS line_prefix ON "palisade".line (namespace, name text_pattern_ops);

-- Claims that were left before they arrived.
CREATE TABLE IF NOT EXISTS "palisade".departed (
  claim uuid PRIMARY KEY,
  until timestamptz NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX IF NOT EXISTS departed_until ON "palisade".departed (until);

-- The greatest token of all lines that were removed: a line that comes back starts above it.
CREATE TABLE IF NOT EXISTS "palisade".floor (
  one   boolean PRIMARY KEY DEFAULT true CHECK (one),
  token bigint NOT NULL
);
INSERT INTO "palisade".floor (token) VALUES (0) ON CONFLICT DO NOTHING;

-- The tokens of postgres+advisory://.
CREATE SEQUENCE IF NOT EXISTS "palisade".token;

-- Who has an advisory lock, for people: one row per session, true only while that session lives
-- and has the lock. Nothing is decided by it.
CREATE UNLOGGED TABLE IF NOT EXISTS "palisade".session (
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
CREATE OR REPLACE FUNCTION "palisade".durable() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') THEN
    PERFORM set_config('synchronous_commit', 'on', true);
  END IF;
END $$;

-- The least token to grant now: a line whose row was deleted goes on above its former tokens.
CREATE OR REPLACE FUNCTION "palisade".least_token() RETURNS bigint LANGUAGE sql AS
  'SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint';

-- Remembers for five minutes that a claim was left, and forgets some others.
CREATE OR REPLACE FUNCTION "palisade".depart(p_claim uuid, at timestamptz)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO "palisade".departed (claim, until) VALUES (p_claim, at + interval '5 minutes')
    ON CONFLICT (claim) DO UPDATE SET until = excluded.until;
  DELETE FROM "palisade".departed WHERE claim = ANY (ARRAY(
    SELECT claim FROM "palisade".departed WHERE until < at ORDER BY until LIMIT 8
    FOR UPDATE SKIP LOCKED));
END $$;

-- Removes some lines that nobody has used for a day: those in a few blocks, chosen at random, so
-- that it costs the same however many there are.
CREATE OR REPLACE FUNCTION "palisade".sweep() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  blocks bigint := pg_relation_size('"palisade".line') / current_setting('block_size')::bigint;
  start  bigint := floor(random() * blocks);
  top    bigint;
BEGIN
  WITH idle AS (
    SELECT ctid FROM "palisade".line
     WHERE ctid >= format('(%s,0)', start)::tid AND ctid < format('(%s,0)', start + 16)::tid
       AND cardinality(seats) = 0 AND doubt < clock_timestamp()
       AND used < clock_timestamp() - interval '1 day'
     LIMIT 500 FOR UPDATE SKIP LOCKED
  ), gone AS (
    DELETE FROM "palisade".line WHERE ctid = ANY (ARRAY(SELECT ctid FROM idle)) RETURNING token
  )
  SELECT max(token) INTO top FROM gone;
  IF top IS NOT NULL THEN
    UPDATE "palisade".floor SET token = greatest(token, top);
  END IF;
END $$;

-- Locks the row of a line, and makes it if there is none.
CREATE OR REPLACE FUNCTION "palisade".grasp(p_namespace text, p_name text)
RETURNS "palisade".line LANGUAGE plpgsql AS $$
DECLARE
  l "palisade".line;
BEGIN
  LOOP
    SELECT * INTO l FROM "palisade".line
     WHERE namespace = p_namespace AND name = p_name FOR UPDATE;
    IF FOUND THEN
      RETURN l;
    END IF;
    IF random() < 1.0 / 32 THEN
      PERFORM "palisade".sweep();
    END IF;
    INSERT INTO "palisade".line (namespace, name, token) VALUES (p_namespace, p_name, 0)
      ON CONFLICT DO NOTHING;
    IF FOUND THEN
      -- A later statement: if the row was removed just now, the floor has its token.
      UPDATE "palisade".line SET token = greatest(line.token, floor.token) FROM "palisade".floor
       WHERE namespace = p_namespace AND name = p_name RETURNING line.* INTO l;
      RETURN l;
    END IF;
  END LOOP;
END $$;

-- Removes what has expired and grants what has come to the front: held iff the weights of all
-- ahead, waiting ones included, plus its own fit. Tells the new holders but "me", so that
-- whoever calls it must "put" the line.
CREATE OR REPLACE FUNCTION "palisade".settle(INOUT l "palisade".line, at timestamptz, me uuid)
LANGUAGE plpgsql AS $$
DECLARE
  s     "palisade".seat;
  seats "palisade".seat[] := '{}';
  room  bigint;
  taken bigint := 0;
  token bigint := l.token;
  lowest bigint := "palisade".least_token();
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

CREATE OR REPLACE FUNCTION "palisade".put(l "palisade".line) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  UPDATE "palisade".line SET token = l.token, used = clock_timestamp(), doubt = l.doubt, seats = l.seats
   WHERE namespace = l.namespace AND name = l.name;
END $$;

-- Takes a place. Answers {0} busy, {1, token, µs left}, {2, 0, µs left} waiting,
-- {3, capacity} in use with another capacity.
CREATE OR REPLACE FUNCTION "palisade".enter(
  p_namespace text, p_name text, p_claim uuid, p_weight bigint, p_capacity bigint,
  p_ttl bigint, p_queue boolean, p_mailbox text, p_owner text, p_value text
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  l     "palisade".line;
  s     "palisade".seat;
  at    timestamptz;
  known boolean := false;
  i     int := 0;
  n     bigint := "palisade".least_token();
BEGIN
  PERFORM "palisade".durable();
  -- A free line, which is nearly all of them: one statement that decides by the row alone.
  UPDATE "palisade".line
     SET token = greatest(token + 1, n), used = clock_timestamp(),
         seats = ARRAY[ROW(p_claim, p_weight, p_capacity, greatest(token + 1, n),
           clock_timestamp() + p_ttl * interval '1 microsecond', p_ttl, false,
           p_mailbox, p_owner, p_value)::"palisade".seat]
   WHERE namespace = p_namespace AND name = p_name AND cardinality(seats) = 0 AND doubt < clock_timestamp()
  RETURNING token INTO n;
  IF FOUND THEN
    RETURN ARRAY[1, n, p_ttl];
  END IF;

  l := "palisade".grasp(p_namespace, p_name);
  at := clock_timestamp();
  IF l.doubt > at THEN
    PERFORM FROM "palisade".departed WHERE claim = p_claim AND until > at;
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
      p_mailbox, p_owner, p_value)::"palisade".seat;
  END IF;
  l := "palisade".settle(l, at, p_claim);
  FOREACH s IN ARRAY l.seats LOOP
    i := i + 1;
    IF s.claim = p_claim THEN
      IF s.counted = 0 AND NOT p_queue THEN
        l.seats := l.seats[: i - 1] || l.seats[i + 1 :];
        PERFORM "palisade".put(l);
        RETURN ARRAY[0::bigint];
      END IF;
      PERFORM "palisade".put(l);
      n := extract(epoch FROM s.expires - at) * 1000000;
      RETURN ARRAY[CASE WHEN s.counted > 0 THEN 1 ELSE 2 END, s.counted, n];
    END IF;
  END LOOP;
  PERFORM "palisade".put(l);
  RETURN ARRAY[0::bigint];
END $$;

-- Says where a claim stands: {0} gone, {1, token}, {2, µs until a lease ahead of it is due, the
-- line's last token}.
CREATE OR REPLACE FUNCTION "palisade".place(p_namespace text, p_name text, p_claim uuid)
RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  l     "palisade".line;
  s     "palisade".seat;
  at    timestamptz;
  due   timestamptz;
  stale boolean;
BEGIN
  SELECT * INTO l FROM "palisade".line WHERE namespace = p_namespace AND name = p_name;
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
    PERFORM "palisade".durable();
    SELECT * INTO l FROM "palisade".line
     WHERE namespace = p_namespace AND name = p_name FOR UPDATE;
    IF NOT FOUND THEN
      RETURN ARRAY[0::bigint];
    END IF;
    l := "palisade".settle(l, clock_timestamp(), p_claim);
    PERFORM "palisade".put(l);
  END LOOP;
END $$;

-- Renews many: for each its ttl in µs, 0 lost, -1 evicted, -2 not known because another
-- transaction has locked its line's row. Each row is read once and written once. Rows are locked
-- in the order of their names, and with p_patience 0 none is waited for; else for so many ms.
CREATE OR REPLACE FUNCTION "palisade".renew(
  p_namespace text, p_names text[], p_claims uuid[], p_counts bigint[], p_patience int
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  answers bigint[] := array_fill(0::bigint, ARRAY[cardinality(p_names)]);
  asked   record;
  l       "palisade".line;
  s       "palisade".seat;
  seats   "palisade".seat[];
  at      timestamptz;
  i       int;
  o       int;
  changed boolean;
BEGIN
  PERFORM "palisade".durable();
  IF p_patience > 0 THEN
    PERFORM set_config('lock_timeout', p_patience::text, true);
  END IF;
  FOR asked IN
    SELECT u.name, array_agg(u.claim) AS claims, array_agg(u.place::int) AS places
      FROM unnest(p_names, p_claims) WITH ORDINALITY AS u (name, claim, place)
     GROUP BY u.name ORDER BY u.name
  LOOP
    IF p_patience > 0 THEN
      SELECT * INTO l FROM "palisade".line
       WHERE namespace = p_namespace AND name = asked.name FOR UPDATE;
    ELSE
      SELECT * INTO l FROM "palisade".line
       WHERE namespace = p_namespace AND name = asked.name FOR UPDATE SKIP LOCKED;
    END IF;
    IF NOT FOUND THEN
      PERFORM FROM "palisade".line WHERE namespace = p_namespace AND name = asked.name;
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
      PERFORM "palisade".put(l);
    END IF;
  END LOOP;
  RETURN answers;
END $$;

-- The same for clients before revision 4, which know of no -2.
CREATE OR REPLACE FUNCTION "palisade".prolong(
  p_namespace text, p_names text[], p_claims uuid[], p_counts bigint[]
) RETURNS bigint[] LANGUAGE plpgsql AS $$
BEGIN
  RETURN "palisade".renew(p_namespace, p_names, p_claims, p_counts, 1500);
END $$;

-- Changes what a holder weighs (p_capacity not null) or says: {1} done, {2} busy, {0} gone.
CREATE OR REPLACE FUNCTION "palisade".amend(
  p_namespace text, p_name text, p_claim uuid, p_counted bigint,
  p_weight bigint, p_capacity bigint, p_value text
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  l       "palisade".line;
  s       "palisade".seat;
  at      timestamptz;
  mine    int;
  holders int := 0;
  others  boolean := false;
  i       int := 0;
BEGIN
  PERFORM "palisade".durable();
  SELECT * INTO l FROM "palisade".line WHERE namespace = p_namespace AND name = p_name FOR UPDATE;
  IF NOT FOUND THEN
    RETURN ARRAY[0::bigint];
  END IF;
  at := clock_timestamp();
  l := "palisade".settle(l, at, NULL);
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
    PERFORM "palisade".put(l);
    RETURN ARRAY[0::bigint];
  END IF;
  IF p_capacity IS NULL THEN
    s.value := p_value;
  ELSE
    IF others OR (holders > 1 AND s.capacity > 0
                  AND (p_capacity = 0 OR p_weight > s.weight)) THEN
      PERFORM "palisade".put(l);
      RETURN ARRAY[2::bigint];
    END IF;
    s.weight := p_weight;
    s.capacity := p_capacity;
  END IF;
  l.seats[mine] := s;
  PERFORM "palisade".put("palisade".settle(l, at, NULL));
  RETURN ARRAY[1::bigint];
END $$;

-- Gives a place up: {1} done, {0} it was not there. What is not there and not counted, or in
-- doubt, is remembered for five minutes: its enter may still be under way.
CREATE OR REPLACE FUNCTION "palisade".leave(
  p_namespace text, p_name text, p_claim uuid, p_counted bigint, p_doubt boolean
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  l    "palisade".line;
  s    "palisade".seat;
  at   timestamptz;
  i    int := 0;
  n    bigint := 0;
BEGIN
  PERFORM "palisade".durable();
  IF NOT p_doubt THEN
    -- The only one in its line: one statement that decides by the row alone.
    UPDATE "palisade".line SET seats = '{}'
     WHERE namespace = p_namespace AND name = p_name AND cardinality(seats) = 1
       AND seats[1].claim = p_claim AND seats[1].expires > clock_timestamp()
       AND (p_counted = 0 OR seats[1].counted IN (0, p_counted));
    IF FOUND THEN
      RETURN ARRAY[1::bigint];
    END IF;
  END IF;

  IF p_counted = 0 OR p_doubt THEN
    l := "palisade".grasp(p_namespace, p_name);
  ELSE
    SELECT * INTO l FROM "palisade".line
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
    PERFORM "palisade".depart(p_claim, at);
    l.doubt := greatest(l.doubt, at + interval '5 minutes');
  ELSIF n = 0 THEN
    RETURN ARRAY[0::bigint];
  END IF;
  PERFORM "palisade".put("palisade".settle(l, at, NULL));
  RETURN ARRAY[n];
END $$;

-- Takes a place away: marks it, or removes it. {1} done, {0} it was not there.
CREATE OR REPLACE FUNCTION "palisade".evict(
  p_namespace text, p_name text, p_claim uuid, p_remove boolean
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  l  "palisade".line;
  s  "palisade".seat;
  at timestamptz;
  i  int := 0;
BEGIN
  PERFORM "palisade".durable();
  SELECT * INTO l FROM "palisade".line WHERE namespace = p_namespace AND name = p_name FOR UPDATE;
  IF NOT FOUND THEN
    RETURN ARRAY[0::bigint];
  END IF;
  at := clock_timestamp();
  FOREACH s IN ARRAY l.seats LOOP
    i := i + 1;
    IF s.claim = p_claim AND s.expires > at THEN
      IF p_remove THEN
        l.seats := l.seats[: i - 1] || l.seats[i + 1 :];
        l := "palisade".settle(l, at, NULL);
        PERFORM pg_notify(s.mailbox, 'g' || s.claim);
      ELSE
        s.evicted := true;
        l.seats[i] := s;
      END IF;
      PERFORM "palisade".put(l);
      PERFORM pg_notify(s.mailbox, 'e' || s.claim);
      RETURN ARRAY[1::bigint];
    END IF;
  END LOOP;
  RETURN ARRAY[0::bigint];
END $$;

-- Gives a line of permits another capacity: {1} done, {0} no permits there, {2} readers
-- (capacity p_readers) are there, {3, weight} a claim is too heavy.
CREATE OR REPLACE FUNCTION "palisade".resize(
  p_namespace text, p_name text, p_capacity bigint, p_readers bigint
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  l     "palisade".line;
  s     "palisade".seat;
  seats "palisade".seat[] := '{}';
  at    timestamptz;
  parts boolean := false;
BEGIN
  PERFORM "palisade".durable();
  SELECT * INTO l FROM "palisade".line WHERE namespace = p_namespace AND name = p_name FOR UPDATE;
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
  PERFORM "palisade".put("palisade".settle(l, at, NULL));
  RETURN ARRAY[1::bigint];
END $$;

-- layout=shedlock: ShedLock's own table, which is not in this schema. "locked_by" of ours is
-- palisade CLAIM TOKEN TTL OWNER; evicting instead of palisade when it is to be let go of.
-- The lock of the transaction puts an enter and a leave of the same claim in order.
-- The row is locked for p_least at the least, though its owner may die before.
CREATE OR REPLACE FUNCTION "palisade".shed_enter(
  p_name text, p_claim text, p_ttl bigint, p_owner text, p_least bigint
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  r  record;
  at timestamp;
  n  bigint;
BEGIN
  PERFORM "palisade".durable();
  PERFORM pg_advisory_xact_lock(hashtextextended('palisade shed ' || p_name, 0));
  at := timezone('utc', clock_timestamp());
  PERFORM FROM "palisade".departed WHERE claim = p_claim::uuid AND until > clock_timestamp();
  IF FOUND THEN
    RETURN ARRAY[0::bigint];
  END IF;
  SELECT locked_by, lock_until INTO r FROM shedlock WHERE name = p_name;
  IF FOUND AND r.lock_until > at THEN
    IF split_part(r.locked_by, ' ', 2) = p_claim THEN
      RETURN ARRAY[1, split_part(r.locked_by, ' ', 3)::bigint,
        least(p_ttl, (extract(epoch FROM r.lock_until - at) * 1000000)::bigint)];
    END IF;
    RETURN ARRAY[0::bigint];
  END IF;
  n := nextval('"palisade".token');
  INSERT INTO shedlock (name, lock_until, locked_at, locked_by)
  VALUES (p_name, at + greatest(p_ttl, p_least) * interval '1 microsecond', at,
          left(concat_ws(' ', 'palisade', p_claim, n, p_ttl, p_owner), 255))
  ON CONFLICT (name) DO UPDATE
     SET lock_until = excluded.lock_until, locked_at = excluded.locked_at,
         locked_by = excluded.locked_by
   WHERE shedlock.lock_until <= at;
  RETURN CASE WHEN FOUND THEN ARRAY[1, n, p_ttl] ELSE ARRAY[0::bigint] END;
END $$;

-- The same for clients before revision 4.
CREATE OR REPLACE FUNCTION "palisade".shed_enter(
  p_name text, p_claim text, p_ttl bigint, p_owner text
) RETURNS bigint[] LANGUAGE plpgsql AS $$
BEGIN
  RETURN "palisade".shed_enter(p_name, p_claim, p_ttl, p_owner, 0);
END $$;

-- As "renew" of our own lines.
CREATE OR REPLACE FUNCTION "palisade".shed_renew(
  p_names text[], p_claims text[], p_counts bigint[], p_patience int
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  answers bigint[] := array_fill(0::bigint, ARRAY[cardinality(p_names)]);
  r       record;
  at      timestamp;
  k       bigint;
BEGIN
  PERFORM "palisade".durable();
  IF p_patience > 0 THEN
    PERFORM set_config('lock_timeout', p_patience::text, true);
  END IF;
  FOR k IN SELECT o FROM unnest(p_names) WITH ORDINALITY AS u (n, o) ORDER BY n, o LOOP
    IF p_patience > 0 THEN
      SELECT locked_by, lock_until INTO r FROM shedlock WHERE name = p_names[k] FOR UPDATE;
    ELSE
      SELECT locked_by, lock_until INTO r FROM shedlock WHERE name = p_names[k]
         FOR UPDATE SKIP LOCKED;
    END IF;
    IF NOT FOUND THEN
      PERFORM FROM shedlock WHERE name = p_names[k];
      IF FOUND THEN
        answers[k] := -2;
      END IF;
      CONTINUE;
    END IF;
    at := timezone('utc', clock_timestamp());
    CONTINUE WHEN r.lock_until <= at OR split_part(r.locked_by, ' ', 2) <> p_claims[k]
      OR (p_counts[k] > 0 AND split_part(r.locked_by, ' ', 3) <> p_counts[k]::text);
    IF starts_with(r.locked_by, 'evicting ') THEN
      answers[k] := -1;
    ELSE
      answers[k] := split_part(r.locked_by, ' ', 4)::bigint;
      UPDATE shedlock
         SET lock_until = greatest(lock_until, at + answers[k] * interval '1 microsecond')
       WHERE name = p_names[k];
    END IF;
  END LOOP;
  RETURN answers;
END $$;

-- The same for clients before revision 4.
CREATE OR REPLACE FUNCTION "palisade".shed_renew(p_names text[], p_claims text[], p_counts bigint[])
RETURNS bigint[] LANGUAGE plpgsql AS $$
BEGIN
  RETURN "palisade".shed_renew(p_names, p_claims, p_counts, 1500);
END $$;

CREATE OR REPLACE FUNCTION "palisade".shed_leave(
  p_name text, p_claim text, p_counted bigint, p_doubt boolean
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  at timestamptz;
  n  bigint := 0;
BEGIN
  PERFORM "palisade".durable();
  PERFORM pg_advisory_xact_lock(hashtextextended('palisade shed ' || p_name, 0));
  at := clock_timestamp();
  UPDATE shedlock SET lock_until = timezone('utc', at)
   WHERE name = p_name AND lock_until > timezone('utc', at)
     AND split_part(locked_by, ' ', 1) IN ('palisade', 'evicting')
     AND split_part(locked_by, ' ', 2) = p_claim
     AND (p_counted = 0 OR split_part(locked_by, ' ', 3) = p_counted::text);
  IF FOUND THEN
    n := 1;
  END IF;
  IF p_doubt OR (n = 0 AND p_counted = 0) THEN
    PERFORM "palisade".depart(p_claim::uuid, at);
  END IF;
  RETURN ARRAY[n];
END $$;

-- Fenced storage: palisade::fence::open. Rows with the triggers that `palisade schema postgres
-- --fence TABLE` prints for any other table.
CREATE TABLE IF NOT EXISTS "palisade".fenced (
  namespace text NOT NULL,
  resource  text NOT NULL,
  data      bytea,
  PRIMARY KEY (namespace, resource)
) WITH (fillfactor = 50);

-- Fences the rows of "palisade"."fenced". A write presents its token in the column "fence", or for its whole
-- transaction by SELECT set_config('palisade.fence', TOKEN, true); a trigger compares it with the
-- highest token of the row, moves it to "fence_token" and clears "fence". A write without a token,
-- or with a lower one, fails: PFT02, PFT01.

ALTER TABLE "palisade"."fenced"
  ADD COLUMN IF NOT EXISTS fence bigint,        -- presented; NULL at rest
  ADD COLUMN IF NOT EXISTS fence_token bigint;  -- the highest that was accepted

-- The tokens of rows that were deleted, and of rows when they were made: a row that comes back
-- starts above them. To forget a key that is never used again, delete its mark.
CREATE TABLE IF NOT EXISTS "palisade"."fenced_fence" (
  resource text PRIMARY KEY,
  token    bigint NOT NULL
);

CREATE OR REPLACE FUNCTION "palisade"."fenced_fence_refuse"(resource text, presented bigint, highest bigint)
RETURNS void LANGUAGE plpgsql AS $fence$
BEGIN
  IF presented IS NULL THEN
    RAISE EXCEPTION 'missing fencing token' USING ERRCODE = 'PFT02',
      HINT = 'Set the column fence, or call set_config(''palisade.fence'', TOKEN, true) in the transaction.';
  ELSIF presented < 1 THEN
    RAISE EXCEPTION 'not a fencing token' USING ERRCODE = 'PFT02';
  END IF;
  RAISE EXCEPTION 'stale fencing token' USING ERRCODE = 'PFT01',
    DETAIL = format('The highest token accepted is %s.', highest),
    HINT = 'Another holder has written since; take the lock again.';
END $fence$;

CREATE OR REPLACE FUNCTION "palisade"."fenced_fence_update"() RETURNS trigger LANGUAGE plpgsql AS $fence$
BEGIN
  IF NEW.fence IS NULL THEN
    NEW.fence := nullif(current_setting('palisade.fence', true), '')::bigint;
  END IF;
  IF NEW.fence IS NULL OR NEW.fence < 1 OR NEW.fence < OLD.fence_token THEN
    PERFORM "palisade"."fenced_fence_refuse"(jsonb_build_array(OLD."namespace", OLD."resource")::text, NEW.fence, OLD.fence_token);
  END IF;
  IF NEW."namespace" IS DISTINCT FROM OLD."namespace" OR NEW."resource" IS DISTINCT FROM OLD."resource" THEN
    RAISE EXCEPTION 'the key of a fenced row can''t change' USING ERRCODE = 'PFT03',
      HINT = 'Delete the row and insert another.';
  END IF;
  NEW.fence_token := NEW.fence;
  NEW.fence := NULL;
  RETURN NEW;
END $fence$;

-- Writes the mark even of a row that is new: two who insert and delete one key take turns by it.
CREATE OR REPLACE FUNCTION "palisade"."fenced_fence_insert"() RETURNS trigger LANGUAGE plpgsql AS $fence$
DECLARE
  v_key text := jsonb_build_array(NEW."namespace", NEW."resource")::text;
BEGIN
  IF NEW.fence IS NULL THEN
    NEW.fence := nullif(current_setting('palisade.fence', true), '')::bigint;
  END IF;
  IF NEW.fence IS NULL OR NEW.fence < 1 THEN
    PERFORM "palisade"."fenced_fence_refuse"(v_key, NEW.fence, NULL);
  END IF;
  INSERT INTO "palisade"."fenced_fence" AS m (resource, token) VALUES (v_key, NEW.fence)
    ON CONFLICT (resource) DO UPDATE SET token = excluded.token
    WHERE NOT excluded.token < m.token;
  IF NOT FOUND THEN
    PERFORM "palisade"."fenced_fence_refuse"(v_key, NEW.fence, (SELECT token FROM "palisade"."fenced_fence" WHERE resource = v_key));
  END IF;
  NEW.fence_token := NEW.fence;
  NEW.fence := NULL;
  RETURN NEW;
END $fence$;

CREATE OR REPLACE FUNCTION "palisade"."fenced_fence_delete"() RETURNS trigger LANGUAGE plpgsql AS $fence$
DECLARE
  v_key   text := jsonb_build_array(OLD."namespace", OLD."resource")::text;
  v_fence bigint := nullif(current_setting('palisade.fence', true), '')::bigint;
BEGIN
  IF v_fence IS NULL OR v_fence < 1 OR v_fence < OLD.fence_token THEN
    PERFORM "palisade"."fenced_fence_refuse"(v_key, v_fence, OLD.fence_token);
  END IF;
  INSERT INTO "palisade"."fenced_fence" AS m (resource, token) VALUES (v_key, v_fence)
    ON CONFLICT (resource) DO UPDATE SET token = excluded.token
    WHERE excluded.token >= m.token;
  IF NOT FOUND THEN
    PERFORM "palisade"."fenced_fence_refuse"(v_key, v_fence, (SELECT token FROM "palisade"."fenced_fence" WHERE resource = v_key));
  END IF;
  RETURN OLD;
END $fence$;

-- Nobody else is at the table meanwhile.
CREATE OR REPLACE FUNCTION "palisade"."fenced_fence_truncate"() RETURNS trigger LANGUAGE plpgsql AS $fence$
DECLARE
  v_fence   bigint := nullif(current_setting('palisade.fence', true), '')::bigint;
  v_highest bigint := greatest((SELECT max(fence_token) FROM "palisade"."fenced"),
                               (SELECT max(token) FROM "palisade"."fenced_fence"));
BEGIN
  IF v_fence IS NULL OR v_fence < 1 OR v_fence < v_highest THEN
    PERFORM "palisade"."fenced_fence_refuse"(NULL, v_fence, v_highest);
  END IF;
  INSERT INTO "palisade"."fenced_fence" AS m (resource, token) SELECT jsonb_build_array(r."namespace", r."resource")::text, v_fence FROM "palisade"."fenced" AS r
    ON CONFLICT (resource) DO UPDATE SET token = excluded.token;
  RETURN NULL;
END $fence$;

DROP TRIGGER IF EXISTS palisade_fence_update ON "palisade"."fenced";
CREATE TRIGGER palisade_fence_update BEFORE UPDATE ON "palisade"."fenced"
  FOR EACH ROW EXECUTE FUNCTION "palisade"."fenced_fence_update"();
DROP TRIGGER IF EXISTS palisade_fence_insert ON "palisade"."fenced";
CREATE TRIGGER palisade_fence_insert BEFORE INSERT ON "palisade"."fenced"
  FOR EACH ROW EXECUTE FUNCTION "palisade"."fenced_fence_insert"();
DROP TRIGGER IF EXISTS palisade_fence_delete ON "palisade"."fenced";
CREATE TRIGGER palisade_fence_delete BEFORE DELETE ON "palisade"."fenced"
  FOR EACH ROW EXECUTE FUNCTION "palisade"."fenced_fence_delete"();
DROP TRIGGER IF EXISTS palisade_fence_truncate ON "palisade"."fenced";
CREATE TRIGGER palisade_fence_truncate BEFORE TRUNCATE ON "palisade"."fenced"
  FOR EACH STATEMENT EXECUTE FUNCTION "palisade"."fenced_fence_truncate"();

-- Forgets a resource, its mark included.
CREATE OR REPLACE FUNCTION "palisade".fence_forget(p_namespace text, p_resource text)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  known boolean;
BEGIN
  PERFORM "palisade".durable();
  PERFORM set_config('palisade.fence', '9223372036854775807', true);
  DELETE FROM "palisade".fenced WHERE namespace = p_namespace AND resource = p_resource;
  known := FOUND;
  PERFORM set_config('palisade.fence', '', true);
  DELETE FROM "palisade".fenced_fence
   WHERE resource = jsonb_build_array(p_namespace, p_resource)::text;
  RETURN known OR FOUND;
END $$;

-- A hold as a condition of the user's own transaction: a row here is a promise that is looked at
-- when the transaction commits, and removed by that, so that no transaction sees rows of another.
-- Nothing of it need survive a crash.
CREATE UNLOGGED TABLE IF NOT EXISTS "palisade".guard (
  txid      bigint NOT NULL,
  namespace text NOT NULL,
  name      text NOT NULL,
  claim     uuid NOT NULL,
  token     bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX IF NOT EXISTS guard_txid ON "palisade".guard (txid);

CREATE OR REPLACE FUNCTION "palisade".guard_by(
  p_namespace text, p_name text, p_claim uuid, p_token bigint
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO "palisade".guard VALUES (txid_current(), p_namespace, p_name, p_claim, p_token);
END $$;

-- Locks the lines of all guards of this transaction, in the order of their names as a renewal does,
-- and only now: until here nobody waits for a client that is paused. No line can be granted to
-- another while it is locked, so that what is seen here is true when the commit is done.
CREATE OR REPLACE FUNCTION "palisade".guarded() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  guards "palisade".guard[];
  g      "palisade".guard;
  held   boolean;
BEGIN
  -- The first of them answers for all; the others find none.
  WITH mine AS (DELETE FROM "palisade".guard AS d WHERE txid = txid_current() RETURNING d AS one)
  SELECT array_agg(one ORDER BY (one).namespace, (one).name) INTO guards FROM mine;
  FOREACH g IN ARRAY coalesce(guards, '{}') LOOP
    SELECT (head).claim = g.claim AND (head).counted = g.token AND (head).capacity = 0
           AND NOT (head).evicted AND (head).expires > clock_timestamp() INTO held
      FROM (SELECT seats[1] AS head FROM "palisade".line
             WHERE namespace = g.namespace AND name = g.name FOR SHARE) AS l;
    IF held IS NOT TRUE THEN
      RAISE EXCEPTION 'the lock that guards this transaction is no longer held'
        USING ERRCODE = 'PFG01', HINT = 'Take the lock again and repeat the transaction.';
    END IF;
  END LOOP;
  RETURN NULL;
END $$;

DROP TRIGGER IF EXISTS guarded ON "palisade".guard;
CREATE CONSTRAINT TRIGGER guarded AFTER INSERT ON "palisade".guard
  DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION "palisade".guarded();

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
-- then read them whole: so that each function says that indexes are to be used.

CREATE SEQUENCE IF NOT EXISTS "palisade".message_number;

-- Tokens begin at the time of day, so that a queue that was lost with its tables goes on above.
DO $$ BEGIN
  IF to_regclass('"palisade".queue_token') IS NULL THEN
    EXECUTE format('CREATE SEQUENCE "palisade".queue_token START %s', "palisade".least_token());
  END IF;
END $$;

CREATE TABLE IF NOT EXISTS "palisade".queue (
  id        int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  namespace text NOT NULL,
  name      text NOT NULL,
  UNIQUE (namespace, name)
);

CREATE TABLE IF NOT EXISTS "palisade".message (
  number   bigint PRIMARY KEY DEFAULT nextval('"palisade".message_number'),
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
CREATE INDEX IF NOT EXISTS message_due ON "palisade".message (queue, due);
CREATE INDEX IF NOT EXISTS message_key ON "palisade".message (queue, key, number) WHERE key IS NOT NULL;
-- What the advisory lock sees to, once more.
CREATE UNIQUE INDEX IF NOT EXISTS message_first ON "palisade".message (queue, key)
  WHERE key IS NOT NULL AND NOT behind;

-- The ids that were pushed.
CREATE TABLE IF NOT EXISTS "palisade".queue_seen (
  queue  int NOT NULL,
  id     text NOT NULL,
  number bigint NOT NULL,
  until  timestamptz NOT NULL,
  PRIMARY KEY (queue, id)
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX IF NOT EXISTS queue_seen_until ON "palisade".queue_seen (until);

-- Consumers that sleep: only they are notified, because a notification holds up the commits of
-- all others.
CREATE UNLOGGED TABLE IF NOT EXISTS "palisade".queue_sleeper (
  sleeper uuid PRIMARY KEY,
  queue   int NOT NULL,
  mailbox text NOT NULL,
  since   timestamptz NOT NULL
);

-- The number of a queue, which is made if there is none.
CREATE OR REPLACE FUNCTION "palisade".queue_of(p_namespace text, p_name text)
RETURNS int LANGUAGE plpgsql AS $$
DECLARE
  q int;
BEGIN
  LOOP
    SELECT id INTO q FROM "palisade".queue WHERE namespace = p_namespace AND name = p_name;
    IF FOUND THEN
      RETURN q;
    END IF;
    INSERT INTO "palisade".queue (namespace, name) VALUES (p_namespace, p_name) ON CONFLICT DO NOTHING;
  END LOOP;
END $$;

-- Locks keys until the end of the transaction, in one order for all.
CREATE OR REPLACE FUNCTION "palisade".queue_lock(p_queue int, p_keys text[])
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
    PERFORM pg_advisory_xact_lock(hashtext('palisade queue "palisade"'), h);
  END LOOP;
END $$;

-- Wakes as many consumers as there are messages, those first that fell asleep last: they live.
CREATE OR REPLACE FUNCTION "palisade".queue_wake(p_queue int, p_count bigint)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  s record;
BEGIN
  FOR s IN
    DELETE FROM "palisade".queue_sleeper WHERE sleeper = ANY (ARRAY(
      SELECT sleeper FROM "palisade".queue_sleeper
       WHERE queue = p_queue AND since > clock_timestamp() - interval '15 seconds'
       ORDER BY since DESC LIMIT p_count FOR UPDATE SKIP LOCKED))
    RETURNING sleeper, mailbox
  LOOP
    PERFORM pg_notify(s.mailbox, 'g' || s.sleeper);
  END LOOP;
END $$;

-- Lets the next of each key come first, and wakes consumers for those that are due. The keys are
-- locked.
CREATE OR REPLACE FUNCTION "palisade".queue_promote(p_queue int, p_keys text[])
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
  n bigint;
BEGIN
  WITH next AS (
    UPDATE "palisade".message m SET behind = false, due = greatest(m.after, clock_timestamp())
     WHERE m.number = ANY (ARRAY(
       SELECT (SELECT min(f.number) FROM "palisade".message f WHERE f.queue = p_queue AND f.key = k)
         FROM (SELECT DISTINCT x FROM unnest(p_keys) AS x) AS keys (k)))
       AND m.behind
    RETURNING m.after
  )
  SELECT count(*) INTO n FROM next WHERE after <= clock_timestamp();
  IF n > 0 THEN
    PERFORM "palisade".queue_wake(p_queue, n);
  END IF;
END $$;

-- Adds messages in their order: the number of each, and whether it was there before.
CREATE OR REPLACE FUNCTION "palisade".queue_push(
  p_namespace text, p_name text, p_ids text[], p_keys text[], p_delays bigint[], p_bodies bytea[],
  p_remembered bigint
) RETURNS TABLE (number bigint, duplicate boolean) LANGUAGE plpgsql SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
  q     int;
  n     bigint;
  at    timestamptz;
  first boolean;
  awake bigint := 0;
BEGIN
  PERFORM "palisade".durable();
  q := "palisade".queue_of(p_namespace, p_name);
  IF array_length(array_remove(p_keys, NULL), 1) IS NULL
     AND array_length(array_remove(p_ids, NULL), 1) IS NULL THEN
    at := clock_timestamp();
    RETURN QUERY INSERT INTO "palisade".message (queue, due, after, body)
      SELECT q, at + d.delay * interval '1 microsecond', at + d.delay * interval '1 microsecond', d.body
        FROM unnest(p_delays, p_bodies) AS d (delay, body)
      RETURNING message.number, false;
    SELECT count(*) INTO awake FROM unnest(p_delays) AS delay WHERE delay = 0;
  ELSE
    PERFORM "palisade".queue_lock(q, p_keys);
    at := clock_timestamp();
    FOR i IN 1 .. cardinality(p_bodies) LOOP
      n := nextval('"palisade".message_number');
      IF p_ids[i] IS NOT NULL THEN
        INSERT INTO "palisade".queue_seen AS s (queue, id, number, until)
          VALUES (q, p_ids[i], n, at + p_remembered * interval '1 microsecond')
          ON CONFLICT (queue, id) DO UPDATE SET number = excluded.number, until = excluded.until
          WHERE s.until < at
            AND NOT EXISTS (SELECT FROM "palisade".message m WHERE m.number = s.number);
        IF NOT FOUND THEN
          SELECT s.number INTO n FROM "palisade".queue_seen s WHERE s.queue = q AND s.id = p_ids[i];
          RETURN QUERY SELECT n, true;
          CONTINUE;
        END IF;
      END IF;
      first := p_keys[i] IS NULL OR NOT EXISTS (
        SELECT FROM "palisade".message m WHERE m.queue = q AND m.key = p_keys[i]);
      INSERT INTO "palisade".message (number, queue, due, behind, after, key, id, body)
        VALUES (n, q,
          CASE WHEN first THEN at + p_delays[i] * interval '1 microsecond' ELSE 'infinity' END,
          NOT first, at + p_delays[i] * interval '1 microsecond', p_keys[i], p_ids[i], p_bodies[i]);
      IF first AND p_delays[i] = 0 THEN
        awake := awake + 1;
      END IF;
      RETURN QUERY SELECT n, false;
    END LOOP;
    DELETE FROM "palisade".queue_seen WHERE ctid = ANY (ARRAY(
      SELECT s.ctid FROM "palisade".queue_seen s WHERE s.until < at
         AND NOT EXISTS (SELECT FROM "palisade".message m WHERE m.number = s.number)
       ORDER BY s.until LIMIT 2 * cardinality(p_bodies) FOR UPDATE SKIP LOCKED));
  END IF;
  IF awake > 0 THEN
    PERFORM "palisade".queue_wake(q, awake);
  END IF;
END $$;

-- Lets a claim and its end, which may overtake it, come one after the other.
CREATE OR REPLACE FUNCTION "palisade".queue_turn(p_batch uuid) RETURNS void LANGUAGE sql AS $$
  SELECT pg_advisory_xact_lock(hashtext('palisade claim "palisade"'), hashtext(p_batch::text))
$$;

-- Claims the first messages that are due. What was claimed as often as allowed, and had no end,
-- becomes a dead letter and is told as such. "Again" answers with what this batch has claimed.
CREATE OR REPLACE FUNCTION "palisade".queue_claim(
  p_namespace text, p_name text, p_batch uuid, p_again boolean, p_count int, p_ttl bigint,
  p_attempts int, p_owner text
) RETURNS TABLE (number bigint, id text, key text, token bigint, attempts int, body bytea, dead boolean)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
#variable_conflict use_column
DECLARE
  q int;
BEGIN
  PERFORM "palisade".durable();
  PERFORM "palisade".queue_turn(p_batch);
  SELECT queue.id INTO q FROM "palisade".queue WHERE namespace = p_namespace AND name = p_name;
  IF p_again THEN
    RETURN QUERY UPDATE "palisade".message m
       SET due = clock_timestamp() + m.ttl * interval '1 microsecond'
     WHERE m.queue = q AND m.due > statement_timestamp() AND m.due < 'infinity'
       AND m.batch = p_batch AND m.token > 0
    RETURNING m.number, m.id, m.key, m.token, m.attempts, m.body, m.dead;
    IF FOUND THEN
      RETURN;
    END IF;
  END IF;
  IF EXISTS (SELECT FROM "palisade".departed WHERE claim = p_batch) THEN
    RETURN;
  END IF;
  -- The time of the statement, which an index can be searched by, and which is not too late.
  RETURN QUERY UPDATE "palisade".message m
     SET due = CASE WHEN m.attempts >= p_attempts THEN 'infinity'
               ELSE clock_timestamp() + p_ttl * interval '1 microsecond' END,
         token = CASE WHEN m.attempts >= p_attempts THEN 0 ELSE nextval('"palisade".queue_token') END,
         dead = m.attempts >= p_attempts,
         why = CASE WHEN m.attempts >= p_attempts THEN
               coalesce(m.why || '; ', '') || 'its last consumer was lost' ELSE m.why END,
         attempts = least(m.attempts + 1, p_attempts),
         ttl = p_ttl, batch = p_batch, owner = p_owner
   WHERE m.number = ANY (ARRAY(
     SELECT f.number FROM "palisade".message f WHERE f.queue = q AND f.due <= statement_timestamp()
      ORDER BY f.due LIMIT p_count FOR UPDATE SKIP LOCKED))
  RETURNING m.number, m.id, m.key, m.token, m.attempts, m.body, m.dead;
END $$;

-- Renews claims: the ttl of each in microseconds, 0 when it is over, -1 when its row is locked,
-- by a transaction that is about to end it.
CREATE OR REPLACE FUNCTION "palisade".queue_renew(p_numbers bigint[], p_tokens bigint[])
RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
  answer bigint[];
BEGIN
  WITH free AS MATERIALIZED (
    SELECT m.number FROM "palisade".message m
      JOIN unnest(p_numbers, p_tokens) AS r (number, token) ON r.number = m.number AND r.token = m.token
     WHERE m.due > clock_timestamp() FOR UPDATE OF m SKIP LOCKED
  ), renewed AS (
    UPDATE "palisade".message m SET due = clock_timestamp() + m.ttl * interval '1 microsecond'
     WHERE m.number = ANY (ARRAY(SELECT number FROM free)) RETURNING m.number, m.ttl
  )
  SELECT array_agg(coalesce(renewed.ttl, CASE WHEN EXISTS (
      SELECT FROM "palisade".message m
       WHERE m.number = r.number AND m.token = r.token AND m.due > clock_timestamp()) THEN -1 ELSE 0 END)
      ORDER BY r.place)
    INTO answer
    FROM unnest(p_numbers, p_tokens) WITH ORDINALITY AS r (number, token, place)
    LEFT JOIN renewed ON renewed.number = r.number;
  RETURN answer;
END $$;

-- Removes messages that are done; answers their numbers.
CREATE OR REPLACE FUNCTION "palisade".queue_done(p_numbers bigint[], p_tokens bigint[], p_keyed boolean)
RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
  q    int;
  keys text[];
  done bigint[];
BEGIN
  PERFORM "palisade".durable();
  IF p_keyed THEN
    SELECT min(m.queue), array_agg(DISTINCT m.key) INTO q, keys
      FROM "palisade".message m WHERE m.number = ANY (p_numbers) AND m.key IS NOT NULL;
    PERFORM "palisade".queue_lock(q, keys);
  END IF;
  WITH gone AS (
    DELETE FROM "palisade".message m USING unnest(p_numbers, p_tokens) AS d (number, token)
     WHERE m.number = d.number AND m.token = d.token RETURNING m.number
  )
  SELECT coalesce(array_agg(number), '{}') INTO done FROM gone;
  IF p_keyed THEN
    PERFORM "palisade".queue_promote(q, keys);
  END IF;
  RETURN done;
END $$;

-- The same for one message in a transaction of the user's, which must not go on without it.
CREATE OR REPLACE FUNCTION "palisade".queue_done_or_fail(p_number bigint, p_token bigint)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF "palisade".queue_done(ARRAY[p_number], ARRAY[p_token], true) = '{}' THEN
    RAISE EXCEPTION 'the message was lost to another consumer' USING ERRCODE = 'PFQ01';
  END IF;
END $$;

-- Ends claims whose messages stay; answers their numbers. "After" in microseconds, or NULL for a
-- dead letter; with "p_untried" the claim does not count, and the message has its place again.
CREATE OR REPLACE FUNCTION "palisade".queue_return(
  p_numbers bigint[], p_tokens bigint[], p_after bigint, p_untried boolean, p_why text
) RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
  q    int;
  done bigint[];
BEGIN
  PERFORM "palisade".durable();
  WITH back AS (
    UPDATE "palisade".message m
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
    PERFORM "palisade".queue_wake(q, cardinality(done));
  END IF;
  RETURN done;
END $$;

-- Gives back what a claim took that was given up; if that is not there, the claim may still come.
CREATE OR REPLACE FUNCTION "palisade".queue_leave(p_namespace text, p_name text, p_batch uuid)
RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
  q int;
  n bigint;
BEGIN
  PERFORM "palisade".queue_turn(p_batch);
  SELECT id INTO q FROM "palisade".queue WHERE namespace = p_namespace AND name = p_name;
  WITH back AS (
    UPDATE "palisade".message m
       SET token = 0, batch = NULL, owner = NULL, due = m.after, attempts = m.attempts - 1
     WHERE m.queue = q AND m.due > statement_timestamp() AND m.due < 'infinity'
       AND m.batch = p_batch AND m.token > 0 RETURNING 1
  )
  SELECT count(*) INTO n FROM back;
  -- What it has not brought yet may come.
  PERFORM "palisade".depart(p_batch, clock_timestamp());
  IF n > 0 THEN
    PERFORM "palisade".queue_wake(q, n);
  END IF;
  RETURN ARRAY[n];
END $$;

-- Gives a claim another ttl: {1} done, {0} it is over.
CREATE OR REPLACE FUNCTION "palisade".queue_extend(p_number bigint, p_token bigint, p_ttl bigint)
RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
  UPDATE "palisade".message m
     SET ttl = p_ttl, due = greatest(m.due, clock_timestamp() + p_ttl * interval '1 microsecond')
   WHERE m.number = p_number AND m.token = p_token AND m.due > clock_timestamp();
  RETURN ARRAY[CASE WHEN FOUND THEN 1 ELSE 0 END::bigint];
END $$;

-- Says that a consumer sleeps: it is told of the next message, once. It does so under a new name
-- each time, since the row of the last one may be locked by a push that takes its time. Answers in
-- how many microseconds the next message is due that is there already, if any is.
CREATE OR REPLACE FUNCTION "palisade".queue_sleep(
  p_namespace text, p_name text, p_sleeper uuid, p_before uuid, p_mailbox text
) RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off SET enable_sort = off AS $$
DECLARE
  q    int := "palisade".queue_of(p_namespace, p_name);
  next timestamptz;
BEGIN
  INSERT INTO "palisade".queue_sleeper (sleeper, queue, mailbox, since)
    VALUES (p_sleeper, q, p_mailbox, clock_timestamp());
  DELETE FROM "palisade".queue_sleeper WHERE sleeper = ANY (ARRAY(
    SELECT sleeper FROM "palisade".queue_sleeper
     WHERE sleeper = p_before OR since < clock_timestamp() - interval '1 minute'
     LIMIT 8 FOR UPDATE SKIP LOCKED));
  SELECT m.due INTO next FROM "palisade".message m WHERE m.queue = q AND m.due < 'infinity'
   ORDER BY m.due LIMIT 1;
  IF next IS NULL THEN
    RETURN '{}';
  END IF;
  RETURN ARRAY[greatest(0, extract(epoch FROM next - clock_timestamp()) * 1000000)::bigint];
END $$;

-- The numbers of the messages that an operator means: one by its id, dead letters, or all.
CREATE OR REPLACE FUNCTION "palisade".queue_pick(p_queue int, p_pick text, p_number bigint, p_id text)
RETURNS SETOF bigint LANGUAGE sql AS $$
  SELECT m.number FROM "palisade".message m
   WHERE m.queue = p_queue
     AND CASE p_pick WHEN 'all' THEN true WHEN 'dead' THEN m.dead
         ELSE m.number = coalesce(p_number,
           (SELECT s.number FROM "palisade".queue_seen s WHERE s.queue = p_queue AND s.id = p_id)) END
$$;

-- Makes messages ready that are neither claimed nor behind another; answers how many.
CREATE OR REPLACE FUNCTION "palisade".queue_retry(
  p_namespace text, p_name text, p_pick text, p_number bigint, p_id text
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  q int;
  n bigint;
BEGIN
  PERFORM "palisade".durable();
  SELECT id INTO q FROM "palisade".queue WHERE namespace = p_namespace AND name = p_name;
  WITH back AS (
    UPDATE "palisade".message m
       SET dead = false, attempts = 0, token = 0, batch = NULL, owner = NULL, due = clock_timestamp(),
           after = least(m.after, clock_timestamp())
     WHERE m.number IN (SELECT "palisade".queue_pick(q, p_pick, p_number, p_id))
       AND NOT m.behind AND (m.token = 0 OR m.due <= clock_timestamp())
    RETURNING 1
  )
  SELECT count(*) INTO n FROM back;
  IF n > 0 THEN
    PERFORM "palisade".queue_wake(q, n);
  END IF;
  RETURN ARRAY[n];
END $$;

-- Removes some messages and forgets their ids, claimed ones only by force; answers how many.
CREATE OR REPLACE FUNCTION "palisade".queue_discard(
  p_namespace text, p_name text, p_pick text, p_number bigint, p_id text, p_force boolean
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  q       int;
  numbers bigint[];
  keys    text[];
  n       bigint;
BEGIN
  PERFORM "palisade".durable();
  SELECT id INTO q FROM "palisade".queue WHERE namespace = p_namespace AND name = p_name;
  SELECT array_agg(m.number), array_agg(DISTINCT m.key) INTO numbers, keys FROM "palisade".message m
   WHERE m.number IN (
     SELECT f.number FROM "palisade".message f
      WHERE f.number IN (SELECT "palisade".queue_pick(q, p_pick, p_number, p_id))
        AND (p_force OR f.token = 0 OR f.due <= clock_timestamp())
      ORDER BY f.number LIMIT 500);
  PERFORM "palisade".queue_lock(q, keys);
  WITH gone AS (
    DELETE FROM "palisade".message m WHERE m.number = ANY (numbers)
       AND (p_force OR m.token = 0 OR m.due <= clock_timestamp()) RETURNING m.id
  ), unseen AS (
    DELETE FROM "palisade".queue_seen s USING gone WHERE s.queue = q AND s.id = gone.id
  )
  SELECT count(*) INTO n FROM gone;
  PERFORM "palisade".queue_promote(q, keys);
  RETURN ARRAY[n];
END $$;

CREATE OR REPLACE FUNCTION "palisade".version() RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT 3';
CREATE OR REPLACE FUNCTION "palisade".revision() RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT 6';

COMMIT;

