package activity

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"pgregory.net/rapid"
)

// model is what the store promises, in memory and one after the other.
type model struct {
	closed bool
	list   []modelActivity
	keys   map[string]modelKey
}

type modelActivity struct {
	id              uuid.UUID
	kind, sender    string
	edited, deleted bool
}

type modelKey struct {
	body string
	seq  int
}

func (m *model) add(kind, sender string) int {
	m.list = append(m.list, modelActivity{kind: kind, sender: sender})
	return len(m.list)
}

func (m *model) append(n *New) string {
	key := n.Caller + " " + n.IdempotencyKey
	body := fmt.Sprint(n.Type, " ", n.Sender, " ", *n.Text, " ", n.ReplyToID)
	if k, there := m.keys[key]; there && n.IdempotencyKey != "" {
		if k.body != body {
			return "reused"
		}
		return fmt.Sprintf("repeat %d", k.seq)
	}
	if m.closed {
		return "closed"
	}
	if n.ReplyToID != nil {
		var target *modelActivity
		for i := range m.list {
			if m.list[i].id == *n.ReplyToID {
				target = &m.list[i]
			}
		}
		edit := n.Type == TypeMessageUpdate || n.Type == TypeMessageDelete
		switch {
		case target == nil,
			n.Type != TypeMessage && target.kind != TypeMessage,
			edit && (target.sender != n.Sender || target.deleted):
			return "invalid /reply_to_id"
		}
		target.edited = target.edited || n.Type == TypeMessageUpdate
		target.deleted = target.deleted || n.Type == TypeMessageDelete
	}
	seq := m.add(n.Type, n.Sender)
	if n.IdempotencyKey != "" {
		m.keys[key] = modelKey{body, seq}
	}
	return fmt.Sprintf("seq %d", seq)
}

// The store against the model, with random batches, closes and reopenings in two conversations.
func TestModel(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	rapid.Check(t, func(rt *rapid.T) {
		convs := [2]uuid.UUID{w.newConversation(t), w.newConversation(t)}
		models := [2]*model{{keys: map[string]modelKey{}}, {keys: map[string]modelKey{}}}
		for range rapid.IntRange(1, 8).Draw(rt, "steps") {
			c := rapid.IntRange(0, 1).Draw(rt, "conversation")
			m := models[c]
			switch rapid.IntRange(0, 5).Draw(rt, "step") {
			case 0:
				_, changed, err := w.store.Close(t.Context(), w.tenant, convs[c], nil, ReasonManual)
				if err != nil || changed == m.closed {
					rt.Fatalf("close: changed %v, %v", changed, err)
				}
				if m.closed = true; changed {
					m.add(TypeConversationUpdate, SenderSystem)
				}
			case 1:
				_, changed, err := w.store.Reopen(t.Context(), w.tenant, convs[c], nil, ReasonManual)
				if err != nil || changed != m.closed {
					rt.Fatalf("reopen: changed %v, %v", changed, err)
				}
				if m.closed = false; changed {
					m.add(TypeConversationUpdate, SenderSystem)
				}
			default:
				var items []New
				var want []string
				used := map[string]bool{}
				for range rapid.IntRange(1, 6).Draw(rt, "items") {
					c := rapid.IntRange(0, 1).Draw(rt, "item's conversation")
					n := drawNew(rt, w, models[rapid.IntRange(0, 1).Draw(rt, "target's conversation")])
					n.ConversationID = convs[c]
					// A key twice in a batch has a test of its own: the model knows no "at the same time".
					key := fmt.Sprint(c, n.Caller, n.IdempotencyKey)
					if n.IdempotencyKey != "" && used[key] {
						continue
					}
					used[key] = true
					items = append(items, n)
				}
				for i := range items {
					of := models[0]
					if items[i].ConversationID == convs[1] {
						of = models[1]
					}
					want = append(want, of.append(&items[i]))
				}
				if diff := cmp.Diff(want, describe(w.append(t, items...))); diff != "" {
					rt.Fatalf("batch (-model +store):\n%s", diff)
				}
			}
			for c, m := range models {
				list, _, err := w.store.List(t.Context(), w.tenant, convs[c], nil, 0, MaxPage)
				if err != nil || len(list) != len(m.list) {
					rt.Fatalf("%d activities, want %d; %v", len(list), len(m.list), err)
				}
				for i, a := range list {
					known := &m.list[i]
					known.id = a.ID
					got := modelActivity{id: a.ID, kind: a.Type, sender: a.Sender, edited: a.EditedAt != nil, deleted: a.DeletedAt != nil}
					if got != *known || a.Seq != int64(i+1) {
						rt.Fatalf("activity %d is %+v, want %+v", i, got, *known)
					}
				}
			}
		}
	})
	w.checkDatabase(t)
}

func drawNew(rt *rapid.T, w *world, target *model) New {
	n := w.message(rapid.SampledFrom([]string{"a", "b"}).Draw(rt, "text"))
	n.Sender = rapid.SampledFrom([]string{"anna", "ben"}).Draw(rt, "sender")
	n.Caller = rapid.SampledFrom([]string{"key:1", "key:2"}).Draw(rt, "caller")
	n.IdempotencyKey = rapid.SampledFrom([]string{"", "", "k", "l"}).Draw(rt, "key")
	n.Type = rapid.SampledFrom([]string{TypeMessage, TypeMessage, TypeMessage, TypeEvent}).Draw(rt, "type")
	if len(target.list) > 0 && rapid.Bool().Draw(rt, "reply") {
		n.Type = rapid.SampledFrom([]string{TypeMessage, TypeMessageReaction, TypeMessageUpdate, TypeMessageDelete}).Draw(rt, "kind of reply")
		n.ReplyToID = ptr(rapid.SampledFrom(target.list).Draw(rt, "target").id)
	}
	return n
}
