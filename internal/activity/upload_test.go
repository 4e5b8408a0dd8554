package activity

import (
	"errors"
	"sync"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
)

func newUpload() Upload {
	id := uuid.Must(uuid.NewV7())
	return Upload{ID: id, ContentType: "image/png", Size: 9, SHA256: [32]byte{1, 2, 3}, Name: "a.png", URL: "/files/" + id.String()}
}

// An upload is an attachment of its activity and a row of the same transaction.
func TestAppendUploads(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	u, second := newUpload(), newUpload()
	n := w.message("look")
	n.Attachments = append(n.Attachments, raw(`{"contentType":"text/html","contentUrl":"https://x.test/"}`))
	n.Uploads = []Upload{u, second}
	a := w.must(t, n)
	want := raw(`[{"contentType":"text/html","contentUrl":"https://x.test/"},
		{"contentType":"image/png","contentUrl":"/files/%s","name":"a.png","size":9},
		{"contentType":"image/png","contentUrl":"/files/%s","name":"a.png","size":9}]`, u.ID, second.ID)
	if diff := gocmp.Diff(want, a.Attachments, jsonEqual); diff != "" {
		t.Errorf("attachments:\n%s", diff)
	}
	if got := w.count(t, `SELECT count(*) FROM attachments WHERE activity_id = $1 AND conversation_id = $2 AND tenant_id = $3`,
		a.ID, w.conv, w.tenant); got != 2 {
		t.Errorf("%d rows, want 2", got)
	}

	u.URL = ""
	other, otherChannel := addTenant(t, w.pool)
	elsewhere := w.newConversation(t)
	for name, tt := range map[string]struct {
		tenant                uuid.UUID
		id                    uuid.UUID
		channel, conversation *uuid.UUID
		err                   error
	}{
		"the tenant":         {w.tenant, u.ID, nil, nil, nil},
		"its channel":        {w.tenant, u.ID, &w.channel, nil, nil},
		"its conversation":   {w.tenant, u.ID, &w.channel, &w.conv, nil},
		"another's":          {other, u.ID, nil, nil, ErrNotFound},
		"other channel":      {w.tenant, u.ID, &otherChannel, nil, ErrNotFound},
		"other conversation": {w.tenant, u.ID, &w.channel, &elsewhere, ErrNotFound},
		"no such":            {w.tenant, uuid.New(), nil, nil, ErrNotFound},
	} {
		got, err := w.store.GetUpload(t.Context(), tt.tenant, tt.id, tt.channel, tt.conversation)
		if !errors.Is(err, tt.err) {
			t.Errorf("%s: %v, want %v", name, err, tt.err)
		} else if diff := gocmp.Diff(u, got); err == nil && diff != "" {
			t.Errorf("%s:\n%s", name, diff)
		}
	}

	orphans, err := w.store.OrphanUploadsAllTenants(t.Context(),
		[]uuid.UUID{w.tenant, w.tenant, other, uuid.New()}, []uuid.UUID{u.ID, uuid.New(), u.ID, u.ID})
	if err != nil {
		t.Fatal(err)
	}
	want2 := map[int]bool{1: true, 2: true}
	for _, i := range orphans {
		if !want2[i] {
			t.Errorf("%d is no orphan", i)
		}
		delete(want2, i)
	}
	if len(want2) != 0 {
		t.Errorf("orphans %v, want 1 and 2", orphans)
	}
	w.checkDatabase(t)
}

// What is not written has no row; a repeat is known by the bytes of its files.
func TestAppendUploadsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	with := func(key string, u Upload) New {
		n := w.keyed(key, "look")
		n.Uploads = []Upload{u}
		return n
	}
	first := w.must(t, with("k", newUpload()))
	again := w.append(t, with("k", newUpload()))[0]
	if again.Err != nil || !again.Repeat || again.Activity.ID != first.ID {
		t.Errorf("the same bytes again: %+v", again)
	}
	other := newUpload()
	other.SHA256[0] = 9
	if r := w.append(t, with("k", other))[0]; !errors.Is(r.Err, ErrKeyReused) {
		t.Errorf("other bytes: %v", r.Err)
	}
	many := w.message("many")
	for range MaxAttachments + 1 {
		many.Uploads = append(many.Uploads, newUpload())
	}
	if r := w.append(t, many)[0]; r.Err == nil {
		t.Error("too many were taken")
	}
	w.lanes.fail.Store(true)
	if r := w.append(t, with("f", newUpload()))[0]; !errors.Is(r.Err, errEnqueue) {
		t.Errorf("failed transaction: %v", r.Err)
	}
	w.lanes.fail.Store(false)
	if _, _, err := w.store.Close(t.Context(), w.tenant, w.conv, nil, ReasonManual); err != nil {
		t.Fatal(err)
	}
	if r := w.append(t, with("c", newUpload()))[0]; !errors.Is(r.Err, ErrClosed) {
		t.Errorf("closed: %v", r.Err)
	}
	if got := w.count(t, `SELECT count(*) FROM attachments`); got != 1 {
		t.Errorf("%d rows, want 1", got)
	}
	w.checkDatabase(t)
}

// Uploads share transactions with what has none; every row is its own activity's.
func TestAppendUploadsInParallel(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	var wg sync.WaitGroup
	for i := range 60 {
		wg.Go(func() {
			n := w.message("m")
			for range i % 3 {
				n.Uploads = append(n.Uploads, newUpload())
			}
			if r := w.append(t, n)[0]; r.Err != nil {
				t.Error(r.Err)
			}
		})
	}
	wg.Wait()
	if got := w.count(t, `SELECT count(*) FROM attachments`); got != 60 {
		t.Errorf("%d rows, want 60", got)
	}
	if got := w.count(t, `SELECT count(*) FROM attachments u JOIN activities a ON a.id = u.activity_id
		WHERE a.attachments @> jsonb_build_array(jsonb_build_object('contentUrl', '/files/' || u.id))`); got != 60 {
		t.Errorf("%d rows belong to the activity that shows them, want 60", got)
	}
	w.checkDatabase(t)
}
