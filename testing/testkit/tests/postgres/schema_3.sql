-- The tables and functions of postgres://, version 3.
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

CREATE TABLE IF NOT EXISTS "palisade".line (
  namespace text NOT NULL,
  name      text NOT NULL,
  token     bigint NOT NULL,                              -- the last one that was granted
  used      timestamptz NOT NULL DEFAULT clock_timestamp(),
  doubt     timestamptz NOT NULL DEFAULT '-infinity',     -- until when "departed" has claims of it
  seats     "palisade".seat[] NOT NULL DEFAULT '{}',        -- holders, then waiters
  PRIMARY KEY (namespace, name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);

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
-- ahead, waiting ones included, plus its own fit. Tells the new holders but "me".
CREATE OR REPLACE FUNCTION "palisade".settle(INOUT l "palisade".line, at timestamptz, me uuid)
LANGUAGE plpgsql AS $$
DECLARE
  s     "palisade".seat;
  seats "palisade".seat[] := '{}';
  room  bigint;
  taken bigint := 0;
  token bigint := l.token;
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
    token := token + 1;
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
  n     bigint;
BEGIN
  -- A free line, which is nearly all of them: one statement that decides by the row alone.
  UPDATE "palisade".line
     SET token = token + 1, used = clock_timestamp(),
         seats = ARRAY[ROW(p_claim, p_weight, p_capacity, token + 1,
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
  FOR i IN 1 .. cardinality(l.seats) LOOP
    s := l.seats[i];
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
    SELECT * INTO l FROM "palisade".line
     WHERE namespace = p_namespace AND name = p_name FOR UPDATE;
    IF NOT FOUND THEN
      RETURN ARRAY[0::bigint];
    END IF;
    l := "palisade".settle(l, clock_timestamp(), p_claim);
    PERFORM "palisade".put(l);
  END LOOP;
END $$;

-- Renews many: for each its ttl in µs, 0 lost, -1 evicted. Rows are locked in the order of their
-- names, so that two callers never wait for each other.
CREATE OR REPLACE FUNCTION "palisade".prolong(
  p_namespace text, p_names text[], p_claims uuid[], p_counts bigint[]
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  answers bigint[] := array_fill(0::bigint, ARRAY[cardinality(p_names)]);
  l       "palisade".line;
  s       "palisade".seat;
  at      timestamptz;
  k       bigint;
BEGIN
  FOR k IN SELECT o FROM unnest(p_names) WITH ORDINALITY AS u (n, o) ORDER BY n, o LOOP
    SELECT * INTO l FROM "palisade".line
     WHERE namespace = p_namespace AND name = p_names[k] FOR UPDATE;
    CONTINUE WHEN NOT FOUND;
    at := clock_timestamp();
    FOR i IN 1 .. cardinality(l.seats) LOOP
      s := l.seats[i];
      CONTINUE WHEN s.claim <> p_claims[k] OR s.expires <= at
        OR (p_counts[k] > 0 AND s.counted <> p_counts[k]);
      IF s.evicted THEN
        answers[k] := -1;
      ELSE
        s.expires := at + s.ttl * interval '1 microsecond';
        l.seats[i] := s;
        answers[k] := s.ttl;
        PERFORM "palisade".put(l);
      END IF;
      EXIT;
    END LOOP;
  END LOOP;
  RETURN answers;
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
BEGIN
  SELECT * INTO l FROM "palisade".line WHERE namespace = p_namespace AND name = p_name FOR UPDATE;
  IF NOT FOUND THEN
    RETURN ARRAY[0::bigint];
  END IF;
  at := clock_timestamp();
  l := "palisade".settle(l, at, NULL);
  FOR i IN 1 .. cardinality(l.seats) LOOP
    s := l.seats[i];
    holders := holders + CASE WHEN s.counted > 0 THEN 1 ELSE 0 END;
    IF s.claim = p_claim THEN
      mine := i;
    ELSE
      others := others OR (s.capacity > 0 AND p_capacity > 0 AND s.capacity <> p_capacity);
    END IF;
  END LOOP;
  s := l.seats[mine];
  IF mine IS NULL OR s.counted = 0 OR s.counted <> p_counted THEN
    RETURN ARRAY[0::bigint];
  END IF;
  IF p_capacity IS NULL THEN
    s.value := p_value;
  ELSE
    IF others OR (holders > 1 AND s.capacity > 0
                  AND (p_capacity = 0 OR p_weight > s.weight)) THEN
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
  n    bigint := 0;
  told text;
BEGIN
  IF NOT p_doubt THEN
    -- The only one in its line: one statement that decides by the row alone.
    UPDATE "palisade".line SET seats = '{}'
     WHERE namespace = p_namespace AND name = p_name AND cardinality(seats) = 1
       AND seats[1].claim = p_claim AND seats[1].expires > clock_timestamp()
       AND (p_counted = 0 OR seats[1].counted IN (0, p_counted));
    IF FOUND THEN
      RETURN ARRAY[1::bigint];
    END IF;
    -- It has the whole line, and so has the next: one statement as well. "settle" would give the
    -- same grant; what has expired further behind is removed by it when its turn comes.
    UPDATE "palisade".line SET token = token + 1, used = clock_timestamp(),
        seats = ROW(seats[2].claim, seats[2].weight, 0, token + 1, seats[2].expires, seats[2].ttl,
          seats[2].evicted, seats[2].mailbox, seats[2].owner, seats[2].value)::"palisade".seat
          || seats[3 :]
     WHERE namespace = p_namespace AND name = p_name AND cardinality(seats) > 1
       AND seats[1].claim = p_claim AND seats[1].capacity = 0 AND seats[1].counted > 0
       AND seats[1].expires > clock_timestamp() AND p_counted IN (0, seats[1].counted)
       AND seats[2].capacity = 0 AND seats[2].counted = 0 AND seats[2].expires > clock_timestamp()
    RETURNING pg_notify(seats[1].mailbox, 'g' || seats[1].claim || ' ' || token) INTO told;
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
  FOR i IN 1 .. cardinality(l.seats) LOOP
    s := l.seats[i];
    IF s.claim = p_claim AND s.expires > at
       AND (p_counted = 0 OR s.counted IN (0, p_counted)) THEN
      l.seats := l.seats[: i - 1] || l.seats[i + 1 :];
      n := 1;
      EXIT;
    END IF;
  END LOOP;
  IF p_doubt OR (n = 0 AND p_counted = 0) THEN
    INSERT INTO "palisade".departed (claim, until) VALUES (p_claim, at + interval '5 minutes')
      ON CONFLICT (claim) DO UPDATE SET until = excluded.until;
    DELETE FROM "palisade".departed WHERE claim = ANY (ARRAY(
      SELECT claim FROM "palisade".departed WHERE until < at ORDER BY until LIMIT 8
      FOR UPDATE SKIP LOCKED));
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
BEGIN
  SELECT * INTO l FROM "palisade".line WHERE namespace = p_namespace AND name = p_name FOR UPDATE;
  IF NOT FOUND THEN
    RETURN ARRAY[0::bigint];
  END IF;
  at := clock_timestamp();
  FOR i IN 1 .. cardinality(l.seats) LOOP
    s := l.seats[i];
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

-- layout=shedlock: ShedLock's own table, which is not in this schema. "locked_by" of ours is
-- palisade CLAIM TOKEN TTL OWNER; evicting instead of palisade when it is to be let go of.
-- The lock of the transaction puts an enter and a leave of the same claim in order.
CREATE OR REPLACE FUNCTION "palisade".shed_enter(
  p_name text, p_claim text, p_ttl bigint, p_owner text
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  r  record;
  at timestamp;
  n  bigint;
BEGIN
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
        (extract(epoch FROM r.lock_until - at) * 1000000)::bigint];
    END IF;
    RETURN ARRAY[0::bigint];
  END IF;
  n := nextval('"palisade".token');
  INSERT INTO shedlock (name, lock_until, locked_at, locked_by)
  VALUES (p_name, at + p_ttl * interval '1 microsecond', at,
          left(concat_ws(' ', 'palisade', p_claim, n, p_ttl, p_owner), 255))
  ON CONFLICT (name) DO UPDATE
     SET lock_until = excluded.lock_until, locked_at = excluded.locked_at,
         locked_by = excluded.locked_by
   WHERE shedlock.lock_until <= at;
  RETURN CASE WHEN FOUND THEN ARRAY[1, n, p_ttl] ELSE ARRAY[0::bigint] END;
END $$;

CREATE OR REPLACE FUNCTION "palisade".shed_renew(p_names text[], p_claims text[], p_counts bigint[])
RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  answers bigint[] := array_fill(0::bigint, ARRAY[cardinality(p_names)]);
  r       record;
  at      timestamp;
  k       bigint;
BEGIN
  FOR k IN SELECT o FROM unnest(p_names) WITH ORDINALITY AS u (n, o) ORDER BY n, o LOOP
    SELECT locked_by, lock_until INTO r FROM shedlock WHERE name = p_names[k] FOR UPDATE;
    at := timezone('utc', clock_timestamp());
    CONTINUE WHEN NOT FOUND OR r.lock_until <= at OR split_part(r.locked_by, ' ', 2) <> p_claims[k]
      OR (p_counts[k] > 0 AND split_part(r.locked_by, ' ', 3) <> p_counts[k]::text);
    IF starts_with(r.locked_by, 'evicting ') THEN
      answers[k] := -1;
    ELSE
      answers[k] := split_part(r.locked_by, ' ', 4)::bigint;
      UPDATE shedlock SET lock_until = at + answers[k] * interval '1 microsecond'
       WHERE name = p_names[k];
    END IF;
  END LOOP;
  RETURN answers;
END $$;

CREATE OR REPLACE FUNCTION "palisade".shed_leave(
  p_name text, p_claim text, p_counted bigint, p_doubt boolean
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  at timestamptz;
  n  bigint := 0;
BEGIN
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
    INSERT INTO "palisade".departed (claim, until) VALUES (p_claim::uuid, at + interval '5 minutes')
      ON CONFLICT (claim) DO UPDATE SET until = excluded.until;
  END IF;
  RETURN ARRAY[n];
END $$;

CREATE OR REPLACE FUNCTION "palisade".version() RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT 3';

COMMIT;
