-- Fences the rows of @table@. A write presents its token in the column "fence", or for its whole
-- transaction by SELECT set_config('palisade.fence', TOKEN, true); a trigger compares it with the
-- highest token of the row, moves it to "fence_token" and clears "fence". A write without a token,
-- or with a lower one, fails: PFT02, PFT01.

ALTER TABLE @table@
  ADD COLUMN IF NOT EXISTS fence bigint,        -- presented; NULL at rest
  ADD COLUMN IF NOT EXISTS fence_token bigint;  -- the highest that was accepted

-- The tokens of rows that were deleted, and of rows when they were made: a row that comes back
-- starts above them. To forget a key that is never used again, delete its mark.
CREATE TABLE IF NOT EXISTS @marks@ (
  resource text PRIMARY KEY,
  token    bigint NOT NULL
);

CREATE OR REPLACE FUNCTION @refuse@(resource text, presented bigint, highest bigint)
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

CREATE OR REPLACE FUNCTION @on_update@() RETURNS trigger LANGUAGE plpgsql AS $fence$
BEGIN
  IF NEW.fence IS NULL THEN
    NEW.fence := nullif(current_setting('palisade.fence', true), '')::bigint;
  END IF;
  IF NEW.fence IS NULL OR NEW.fence < 1 OR NEW.fence @older@ OLD.fence_token THEN
    PERFORM @refuse@(@old_key@, NEW.fence, OLD.fence_token);
  END IF;
  IF @key_changed@ THEN
    RAISE EXCEPTION 'the key of a fenced row can''t change' USING ERRCODE = 'PFT03',
      HINT = 'Delete the row and insert another.';
  END IF;
  NEW.fence_token := NEW.fence;
  NEW.fence := NULL;
  RETURN NEW;
END $fence$;

-- Writes the mark even of a row that is new: two who insert and delete one key take turns by it.
CREATE OR REPLACE FUNCTION @on_insert@() RETURNS trigger LANGUAGE plpgsql AS $fence$
DECLARE
  v_key text := @new_key@;
BEGIN
  IF NEW.fence IS NULL THEN
    NEW.fence := nullif(current_setting('palisade.fence', true), '')::bigint;
  END IF;
  IF NEW.fence IS NULL OR NEW.fence < 1 THEN
    PERFORM @refuse@(v_key, NEW.fence, NULL);
  END IF;
  INSERT INTO @marks@ AS m (resource, token) VALUES (v_key, NEW.fence)
    ON CONFLICT (resource) DO UPDATE SET token = excluded.token
    WHERE NOT excluded.token @older@ m.token;
  IF NOT FOUND THEN
    PERFORM @refuse@(v_key, NEW.fence, (SELECT token FROM @marks@ WHERE resource = v_key));
  END IF;
  NEW.fence_token := NEW.fence;
  NEW.fence := NULL;
  RETURN NEW;
END $fence$;

CREATE OR REPLACE FUNCTION @on_delete@() RETURNS trigger LANGUAGE plpgsql AS $fence$
DECLARE
  v_key   text := @old_key@;
  v_fence bigint := nullif(current_setting('palisade.fence', true), '')::bigint;
BEGIN
  IF v_fence IS NULL OR v_fence < 1 OR v_fence @older@ OLD.fence_token THEN
    PERFORM @refuse@(v_key, v_fence, OLD.fence_token);
  END IF;
  INSERT INTO @marks@ AS m (resource, token) VALUES (v_key, v_fence)
    ON CONFLICT (resource) DO UPDATE SET token = excluded.token
    WHERE excluded.token >= m.token;
  IF NOT FOUND THEN
    PERFORM @refuse@(v_key, v_fence, (SELECT token FROM @marks@ WHERE resource = v_key));
  END IF;
  RETURN OLD;
END $fence$;

-- Nobody else is at the table meanwhile.
CREATE OR REPLACE FUNCTION @on_truncate@() RETURNS trigger LANGUAGE plpgsql AS $fence$
DECLARE
  v_fence   bigint := nullif(current_setting('palisade.fence', true), '')::bigint;
  v_highest bigint := greatest((SELECT max(fence_token) FROM @table@),
                               (SELECT max(token) FROM @marks@));
BEGIN
  IF v_fence IS NULL OR v_fence < 1 OR v_fence @older@ v_highest THEN
    PERFORM @refuse@(NULL, v_fence, v_highest);
  END IF;
  INSERT INTO @marks@ AS m (resource, token) SELECT @row_key@, v_fence FROM @table@ AS r
    ON CONFLICT (resource) DO UPDATE SET token = excluded.token;
  RETURN NULL;
END $fence$;

DROP TRIGGER IF EXISTS palisade_fence_update ON @table@;
CREATE TRIGGER palisade_fence_update BEFORE UPDATE ON @table@
  FOR EACH ROW EXECUTE FUNCTION @on_update@();
DROP TRIGGER IF EXISTS palisade_fence_insert ON @table@;
CREATE TRIGGER palisade_fence_insert BEFORE INSERT ON @table@
  FOR EACH ROW EXECUTE FUNCTION @on_insert@();
DROP TRIGGER IF EXISTS palisade_fence_delete ON @table@;
CREATE TRIGGER palisade_fence_delete BEFORE DELETE ON @table@
  FOR EACH ROW EXECUTE FUNCTION @on_delete@();
DROP TRIGGER IF EXISTS palisade_fence_truncate ON @table@;
CREATE TRIGGER palisade_fence_truncate BEFORE TRUNCATE ON @table@
  FOR EACH STATEMENT EXECUTE FUNCTION @on_truncate@();
