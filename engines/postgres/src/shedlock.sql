-- layout=shedlock: ShedLock's own table, which is not in this schema. "locked_by" of ours is
-- palisade CLAIM TOKEN TTL OWNER; evicting instead of palisade when it is to be let go of.
-- The lock of the transaction puts an enter and a leave of the same claim in order.
-- The row is locked for p_least at the least, though its owner may die before.
CREATE OR REPLACE FUNCTION @schema@.shed_enter(
  p_name text, p_claim text, p_ttl bigint, p_owner text, p_least bigint
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  r  record;
  at timestamp;
  n  bigint;
BEGIN
  PERFORM @schema@.verb();
  PERFORM pg_advisory_xact_lock(hashtextextended('palisade shed ' || p_name, 0));
  at := timezone('utc', clock_timestamp());
  PERFORM FROM @schema@.departed WHERE claim = p_claim::uuid AND until > clock_timestamp();
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
  n := nextval('@schema@.token');
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
CREATE OR REPLACE FUNCTION @schema@.shed_enter(
  p_name text, p_claim text, p_ttl bigint, p_owner text
) RETURNS bigint[] LANGUAGE plpgsql AS $$
BEGIN
  RETURN @schema@.shed_enter(p_name, p_claim, p_ttl, p_owner, 0);
END $$;

-- As "renew" of our own lines.
CREATE OR REPLACE FUNCTION @schema@.shed_renew(
  p_names text[], p_claims text[], p_counts bigint[], p_patience int
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  answers bigint[] := array_fill(0::bigint, ARRAY[cardinality(p_names)]);
  r       record;
  at      timestamp;
  k       bigint;
BEGIN
  PERFORM @schema@.verb();
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
CREATE OR REPLACE FUNCTION @schema@.shed_renew(p_names text[], p_claims text[], p_counts bigint[])
RETURNS bigint[] LANGUAGE plpgsql AS $$
BEGIN
  RETURN @schema@.shed_renew(p_names, p_claims, p_counts, 1500);
END $$;

CREATE OR REPLACE FUNCTION @schema@.shed_leave(
  p_name text, p_claim text, p_counted bigint, p_doubt boolean
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  at timestamptz;
  n  bigint := 0;
BEGIN
  PERFORM @schema@.verb();
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
    PERFORM @schema@.depart(p_claim::uuid, at);
  END IF;
  RETURN ARRAY[n];
END $$;
