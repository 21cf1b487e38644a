-- A hold as a condition of the user's own transaction: a row here is a promise that is looked at
-- when the transaction commits, and removed by that, so that no transaction sees rows of another.
-- Nothing of it need survive a crash.
CREATE UNLOGGED TABLE IF NOT EXISTS @schema@.guard (
  txid      bigint NOT NULL DEFAULT txid_current(),
  namespace text NOT NULL,
  name      text NOT NULL,
  claim     uuid NOT NULL,
  token     bigint NOT NULL,
  PRIMARY KEY (txid, namespace, name, claim)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Locks the lines of all guards of this transaction, in the order of their names as a renewal does,
-- and only now: until here nobody waits for a client that is paused. No line can be granted to
-- another while it is locked, so that what is seen here is true when the commit is done.
CREATE OR REPLACE FUNCTION @schema@.guarded() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  g record;
  s @schema@.seat;
BEGIN
  FOR g IN
    WITH mine AS (DELETE FROM @schema@.guard WHERE txid = txid_current() RETURNING *)
    SELECT * FROM mine ORDER BY namespace, name
  LOOP
    s := NULL;
    SELECT (seats[1]).* INTO s FROM @schema@.line
     WHERE namespace = g.namespace AND name = g.name FOR SHARE;
    IF s.claim IS DISTINCT FROM g.claim OR s.counted <> g.token OR s.capacity <> 0
       OR s.evicted OR s.expires <= clock_timestamp() THEN
      RAISE EXCEPTION 'the lock that guards this transaction is no longer held'
        USING ERRCODE = 'PFG01', HINT = 'Take the lock again and repeat the transaction.';
    END IF;
  END LOOP;
  RETURN NULL;
END $$;

DROP TRIGGER IF EXISTS guarded ON @schema@.guard;
CREATE CONSTRAINT TRIGGER guarded AFTER INSERT ON @schema@.guard
  DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION @schema@.guarded();
