-- Fenced storage: palisade::fence::open. Rows with the triggers that `palisade schema postgres
-- --fence TABLE` prints for any other table.
CREATE TABLE IF NOT EXISTS @schema@.fenced (
  namespace text NOT NULL,
  resource  text NOT NULL,
  data      bytea,
  PRIMARY KEY (namespace, resource)
) WITH (fillfactor = 50);

@triggers@
-- Forgets a resource, its mark included.
CREATE OR REPLACE FUNCTION @schema@.fence_forget(p_namespace text, p_resource text)
RETURNS boolean LANGUAGE plpgsql SET jit = off SET enable_seqscan = off AS $$
DECLARE
  known boolean;
BEGIN
  PERFORM @schema@.durable();
  PERFORM set_config('palisade.fence', '9223372036854775807', true);
  DELETE FROM @schema@.fenced WHERE namespace = p_namespace AND resource = p_resource;
  known := FOUND;
  PERFORM set_config('palisade.fence', '', true);
  DELETE FROM @schema@.fenced_fence
   WHERE namespace = p_namespace AND resource = p_resource;
  RETURN known OR FOUND;
END $$;
