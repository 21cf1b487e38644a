-- A hold as a condition of the user's own transaction: a row here is a promise that is looked at
-- when the transaction commits, and removed by that, so that no transaction sees rows of another.
-- Nothing of it need survive a crash.
CREATE UNLOGGED TABLE IF NOT EXISTS @schema@.guard (
  txid      bigint NOT NULL,
  namespace text NOT NULL,
  name      text NOT NULL,
  claim     uuid NOT NULL,
  token     bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX IF NOT EXISTS guard_txid ON @schema@.guard (txid);

CREATE OR REPLACE FUNCTION @schema@.guard_by(
  p_namespace text, p_name text, p_claim uuid, p_token bigint
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO @schema@.guard VALUES (txid_current(), p_namespace, p_name, p_claim, p_token);
END $$;

-- Locks the lines of all guards of this transaction, in the order of their names as a renewal does,
-- and only now: until here nobody waits for a client that is paused. No line can be granted to
-- another while it is locked, so that what is seen here is true when the commit is done.
CREATE OR REPLACE FUNCTION @schema@.guarded() RETURNS trigger LANGUAGE plpgsql
SET jit = off SET enable_seqscan = off AS $$
DECLARE
  guards @schema@.guard[];
  g      @schema@.guard;
  held   boolean;
BEGIN
  -- The first of them answers for all; the others find none.
  WITH mine AS (DELETE FROM @schema@.guard AS d WHERE txid = txid_current() RETURNING d AS one)
  SELECT array_agg(one ORDER BY (one).namespace, (one).name) INTO guards FROM mine;
  FOREACH g IN ARRAY coalesce(guards, '{}') LOOP
    SELECT (head).claim = g.claim AND (head).counted = g.token AND (head).capacity = 0
           AND NOT (head).evicted AND (head).expires > clock_timestamp() INTO held
      FROM (SELECT seats[1] AS head FROM @schema@.line
             WHERE namespace = g.namespace AND name = g.name FOR SHARE) AS l;
    IF held IS NOT TRUE THEN
      RAISE EXCEPTION 'the lock that guards this transaction is no longer held'
        USING ERRCODE = 'PFG01', HINT = 'Take the lock again and repeat the transaction.';
    END IF;
  END LOOP;
  RETURN NULL;
END $$;

DROP TRIGGER IF EXISTS guarded ON @schema@.guard;
CREATE CONSTRAINT TRIGGER guarded AFTER INSERT ON @schema@.guard
  DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION @schema@.guarded();
