-- What an earlier version made of a table stock with the key id: its marks are keyed by text.
-- Fences the rows of "public"."stock". A write presents its token in the column "fence", or for its whole
-- transaction by SELECT set_config('palisade.fence', TOKEN, true); a trigger compares it with the
-- highest token of the row, moves it to "fence_token" and clears "fence". A write without a token,
-- or with a lower one, fails: PFT02, PFT01.

ALTER TABLE "public"."stock"
  ADD COLUMN IF NOT EXISTS fence bigint,        -- presented; NULL at rest
  ADD COLUMN IF NOT EXISTS fence_token bigint;  -- the highest that was accepted

-- The tokens of rows that were deleted, and of rows when they were made: a row that comes back
-- starts above them. To forget a key that is never used again, delete its mark.
CREATE TABLE IF NOT EXISTS "public"."stock_fence" (
  resource text PRIMARY KEY,
  token    bigint NOT NULL
);

CREATE OR REPLACE FUNCTION "public"."stock_fence_refuse"(resource text, presented bigint, highest bigint)
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

CREATE OR REPLACE FUNCTION "public"."stock_fence_update"() RETURNS trigger LANGUAGE plpgsql AS $fence$
BEGIN
  IF NEW.fence IS NULL THEN
    NEW.fence := nullif(current_setting('palisade.fence', true), '')::bigint;
  END IF;
  IF NEW.fence IS NULL OR NEW.fence < 1 OR NEW.fence < OLD.fence_token THEN
    PERFORM "public"."stock_fence_refuse"(OLD."id"::text, NEW.fence, OLD.fence_token);
  END IF;
  IF NEW."id" IS DISTINCT FROM OLD."id" THEN
    RAISE EXCEPTION 'the key of a fenced row can''t change' USING ERRCODE = 'PFT03',
      HINT = 'Delete the row and insert another.';
  END IF;
  NEW.fence_token := NEW.fence;
  NEW.fence := NULL;
  RETURN NEW;
END $fence$;

-- Writes the mark even of a row that is new: two who insert and delete one key take turns by it.
CREATE OR REPLACE FUNCTION "public"."stock_fence_insert"() RETURNS trigger LANGUAGE plpgsql AS $fence$
DECLARE
  v_key text := NEW."id"::text;
BEGIN
  IF NEW.fence IS NULL THEN
    NEW.fence := nullif(current_setting('palisade.fence', true), '')::bigint;
  END IF;
  IF NEW.fence IS NULL OR NEW.fence < 1 THEN
    PERFORM "public"."stock_fence_refuse"(v_key, NEW.fence, NULL);
  END IF;
  INSERT INTO "public"."stock_fence" AS m (resource, token) VALUES (v_key, NEW.fence)
    ON CONFLICT (resource) DO UPDATE SET token = excluded.token
    WHERE NOT excluded.token < m.token;
  IF NOT FOUND THEN
    PERFORM "public"."stock_fence_refuse"(v_key, NEW.fence, (SELECT token FROM "public"."stock_fence" WHERE resource = v_key));
  END IF;
  NEW.fence_token := NEW.fence;
  NEW.fence := NULL;
  RETURN NEW;
END $fence$;

CREATE OR REPLACE FUNCTION "public"."stock_fence_delete"() RETURNS trigger LANGUAGE plpgsql AS $fence$
DECLARE
  v_key   text := OLD."id"::text;
  v_fence bigint := nullif(current_setting('palisade.fence', true), '')::bigint;
BEGIN
  IF v_fence IS NULL OR v_fence < 1 OR v_fence < OLD.fence_token THEN
    PERFORM "public"."stock_fence_refuse"(v_key, v_fence, OLD.fence_token);
  END IF;
  INSERT INTO "public"."stock_fence" AS m (resource, token) VALUES (v_key, v_fence)
    ON CONFLICT (resource) DO UPDATE SET token = excluded.token
    WHERE excluded.token >= m.token;
  IF NOT FOUND THEN
    PERFORM "public"."stock_fence_refuse"(v_key, v_fence, (SELECT token FROM "public"."stock_fence" WHERE resource = v_key));
  END IF;
  RETURN OLD;
END $fence$;

-- Nobody else is at the table meanwhile.
CREATE OR REPLACE FUNCTION "public"."stock_fence_truncate"() RETURNS trigger LANGUAGE plpgsql AS $fence$
DECLARE
  v_fence   bigint := nullif(current_setting('palisade.fence', true), '')::bigint;
  v_highest bigint := greatest((SELECT max(fence_token) FROM "public"."stock"),
                               (SELECT max(token) FROM "public"."stock_fence"));
BEGIN
  IF v_fence IS NULL OR v_fence < 1 OR v_fence < v_highest THEN
    PERFORM "public"."stock_fence_refuse"(NULL, v_fence, v_highest);
  END IF;
  INSERT INTO "public"."stock_fence" AS m (resource, token) SELECT r."id"::text, v_fence FROM "public"."stock" AS r
    ON CONFLICT (resource) DO UPDATE SET token = excluded.token;
  RETURN NULL;
END $fence$;

DROP TRIGGER IF EXISTS palisade_fence_update ON "public"."stock";
CREATE TRIGGER palisade_fence_update BEFORE UPDATE ON "public"."stock"
  FOR EACH ROW EXECUTE FUNCTION "public"."stock_fence_update"();
DROP TRIGGER IF EXISTS palisade_fence_insert ON "public"."stock";
CREATE TRIGGER palisade_fence_insert BEFORE INSERT ON "public"."stock"
  FOR EACH ROW EXECUTE FUNCTION "public"."stock_fence_insert"();
DROP TRIGGER IF EXISTS palisade_fence_delete ON "public"."stock";
CREATE TRIGGER palisade_fence_delete BEFORE DELETE ON "public"."stock"
  FOR EACH ROW EXECUTE FUNCTION "public"."stock_fence_delete"();
DROP TRIGGER IF EXISTS palisade_fence_truncate ON "public"."stock";
CREATE TRIGGER palisade_fence_truncate BEFORE TRUNCATE ON "public"."stock"
  FOR EACH STATEMENT EXECUTE FUNCTION "public"."stock_fence_truncate"();
