package main

import (
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/postgres"
	"converger/internal/secrets"
	"converger/migrations/pgtest"
)

// notSealed are the columns of bytes that hold no sealed value, and what they hold instead. A new column of bytes goes
// here or into its package's SealedColumns; secrets have no other type.
var notSealed = map[string]string{
	"api_keys.hash":                 "SHA-256",
	"operator_tokens.hash":          "SHA-256",
	"web_sessions.hash":             "SHA-256",
	"sign_in_links.hash":            "SHA-256",
	"channels.secret_hash":          "SHA-256",
	"channels.previous_secret_hash": "SHA-256",
	"idempotency_keys.body_hash":    "SHA-256",
	"inbound_events.body":           "what a provider sent",
	"attachments.sha256":            "of a file",
	"river_job.unique_key":          "of a job, by River",
}

// bytesColumns are all columns of bytes, as table.column; partitions count as their parent.
func bytesColumns(t testing.TB, pool *pgxpool.Pool) []string {
	t.Helper()
	rows, _ := pool.Query(t.Context(), `
SELECT c.relname || '.' || a.attname
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE a.atttypid IN ('bytea'::regtype, 'bytea[]'::regtype) AND a.attnum > 0 AND NOT a.attisdropped AND c.relkind IN ('r', 'p') AND NOT c.relispartition
  AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
ORDER BY 1`)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// Every column that can hold a sealed value is rotated, or listed with the reason why it holds none.
func TestNoSealedColumnIsForgotten(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	var sealed []string
	for _, c := range sealedColumns() {
		sealed = append(sealed, c.String())
		// The rotation walks by the row's column: it must be unique and have an index of its own.
		var ok bool
		err := pool.QueryRow(t.Context(), `
SELECT EXISTS (SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
               WHERE i.indrelid = $1::regclass AND i.indisunique AND i.indpred IS NULL AND i.indnkeyatts = 1 AND a.attname = $2
                 AND a.atttypid = 'uuid'::regtype)`, c.Table, c.Row).Scan(&ok)
		if err != nil || !ok {
			t.Errorf("%s: %s is not unique by an index of its own (%v)", c, c.Row, err)
		}
	}
	have := bytesColumns(t, pool)
	for _, c := range have {
		if slices.Contains(sealed, c) == (notSealed[c] != "") {
			t.Errorf("%s: is it sealed? Put it into SealedColumns of its package, or into notSealed with what it holds", c)
		}
	}
	for _, c := range sealed {
		if !slices.Contains(have, c) {
			t.Errorf("%s is rotated and not there", c)
		}
	}
	for c := range notSealed {
		if !slices.Contains(have, c) {
			t.Errorf("%s is listed and not there", c)
		}
	}
}

// newCloakKey is a key in the environment's form, made of its number.
func newCloakKey(t testing.TB, number byte) string {
	t.Helper()
	b := make([]byte, secrets.KeySize)
	for i := range b {
		b[i] = byte(i)*7 + number
	}
	text := base64.StdEncoding.EncodeToString(b)
	if _, err := decodeKey(text); err != nil {
		t.Fatal(err)
	}
	return text
}

func idOf(t testing.TB, cloakKey string) string {
	t.Helper()
	b, err := decodeKey(cloakKey)
	if err != nil {
		t.Fatal(err)
	}
	return secrets.IDOf(b).String()
}

// The whole change of CLOAK_KEY as the README tells it: the new key in, the old one retired, rotated beside the running
// node and beside changes, and taken out. Secrets, overlaps and settings are what they were.
func TestKeyIsChanged(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	oldKey, newKey := testCloakKey, newCloakKey(t, 3)
	keys := func(current, retired string) map[string]string {
		return map[string]string{"DATABASE_URL": url, "CLOAK_KEY": current, "CLOAK_RETIRED_KEYS": retired}
	}
	own := newEndpoint(t)

	p := serve(t, url, nil)
	ops := management(t, p, url)
	c := newCustomer(t, ops, "Tenant")
	hooks := []wire{}
	for i := range 5 {
		hooks = append(hooks, data[wire](t, ops.call(t, 201, "POST", "/api/v1/management/tenants/"+c.id+"/channels", object(map[string]any{
			"name": fmt.Sprint("hook ", i), "type": "webhook", "config": map[string]any{"url": own.url, "headers": map[string]any{"X-Own": "a header's secret"}}}))))
	}
	hook := hooks[0]
	chat := c.newConversation(t, hook.ID)
	second := data[wire](t, ops.call(t, 200, "POST", "/api/v1/management/channels/"+hook.ID+"/secret", "")).Secret // both work for a day
	ops.call(t, 204, "DELETE", "/api/v1/management/channels/"+hooks[4].ID, "")
	if err := p.stop(t); err != nil {
		t.Error(err)
	}
	status := start(t, keys(oldKey, ""), "secrets", "status", "--verify")
	if err := status.result(t); err != nil || !strings.Contains(status.out.String(), "Every value opens") {
		t.Errorf("before: %v\n%s", err, status.out)
	}

	// The new key in, the old one retired.
	p = serve(t, url, keys(newKey, oldKey))
	ops.base.Store(&p.base)
	status = start(t, keys(newKey, oldKey), "secrets", "status")
	if err := status.result(t); !errors.Is(err, errNotRotated) || !strings.Contains(status.out.String(), idOf(t, oldKey)+"  CLOAK_RETIRED_KEYS, number 1  11") {
		t.Errorf("before the rotation: %v\n%s", err, status.out)
	}
	// Without the old key nothing opens: the rotation says so, leaves it and fails.
	blind := start(t, keys(newKey, ""), "secrets", "rotate")
	if err := blind.result(t); err == nil || !strings.Contains(err.Error(), "11 value(s) do not open") || !strings.Contains(blind.out.String(), "channels.config of row "+hook.ID) {
		t.Errorf("rotated without the old key: %v\n%s", err, blind.out)
	}

	// Three at once, beside changes.
	var wg sync.WaitGroup
	stop := make(chan struct{})
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			a, err := ops.try(t.Context(), "PATCH", "/api/v1/management/channels/"+hooks[1+i%3].ID, object(map[string]any{"name": fmt.Sprint("renamed ", 1+i%3)}))
			if err != nil || a.status != http.StatusOK {
				t.Errorf("a change beside the rotation: %v %s", err, a)
				return
			}
		}
	})
	runs := make([]*program, 3)
	for i := range runs {
		runs[i] = start(t, keys(newKey, oldKey), "secrets", "rotate")
	}
	for _, r := range runs {
		if err := r.result(t); err != nil {
			t.Errorf("%v\n%s%s", err, r.out, r.log)
		}
	}
	close(stop)
	wg.Wait()
	status = start(t, keys(newKey, oldKey), "secrets", "status", "--verify")
	if err := status.result(t); err != nil || !strings.Contains(status.out.String(), "no longer needed") || !strings.Contains(status.out.String(), "Every value opens") {
		t.Errorf("after the rotation: %v\n%s", err, status.out)
	}
	var audited int
	if err := pgtest.Open(t, url, postgres.Options{MaxConns: 1}).QueryRow(t.Context(),
		`SELECT count(*) FROM audit_log WHERE action = 'rotate' AND resource_type = 'encryption_key' AND resource_id = $1`, idOf(t, newKey)).Scan(&audited); err != nil || audited < 1 {
		t.Errorf("%d rows in the audit log, %v", audited, err)
	}

	// The old key out.
	if err := p.stop(t); err != nil {
		t.Error(err)
	}
	p = serve(t, url, keys(newKey, ""))
	ops.base.Store(&p.base)
	a := own.await(t, data[message](t, c.api.call(t, 201, "POST", "/api/v1/conversations/"+chat+"/activities", `{"text":"after"}`)).ID)
	if a.header.Get("X-Own") != "a header's secret" {
		t.Errorf("the channel's header is %q", a.header.Get("X-Own"))
	}
	for _, secret := range []string{hook.Secret, second} {
		c.api.with("Authorization", "Bearer "+secret).call(t, 200, "POST", "/api/v1/converger/tokens/generate", `{"user":{"id":"ada"}}`)
	}
}

func TestSecretsCommandsSayWhatTheyNeed(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	for name, test := range map[string]struct {
		environ map[string]string
		want    string
	}{
		"no key":      {map[string]string{"DATABASE_URL": url}, "CLOAK_KEY: is missing"},
		"no database": {map[string]string{"CLOAK_KEY": testCloakKey}, "which database"},
		"a weak key":  {map[string]string{"DATABASE_URL": url, "CLOAK_KEY": testCloakKey, "CLOAK_RETIRED_KEYS": "short"}, "CLOAK_RETIRED_KEYS"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, command := range []string{"status", "rotate"} {
				if err := start(t, test.environ, "secrets", command).result(t); err == nil || !strings.Contains(err.Error(), test.want) {
					t.Errorf("%s: %v, want it to say %q", command, err, test.want)
				}
			}
		})
	}
	// Nothing is sealed yet: that is fine, and nothing is noted.
	environ := map[string]string{"DATABASE_URL": url, "CLOAK_KEY": testCloakKey}
	if out := runOK(t, environ, "secrets", "rotate"); !strings.Contains(out, "0 value(s)") {
		t.Errorf("rotate of nothing: %s", out)
	}
	runOK(t, environ, "secrets", "status")
}
