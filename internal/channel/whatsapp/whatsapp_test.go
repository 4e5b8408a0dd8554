package whatsapp

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"converger/internal/channel"
)

func TestParticipant(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		given []channel.Identity
		want  []channel.Identity
	}{
		"nobody":                   {[]channel.Identity{UserID(""), Phone("")}, nil},
		"too long to be stored":    {[]channel.Identity{Phone(strings.Repeat("1", MaxIdentity+1))}, nil},
		"in the given order, once": {[]channel.Identity{UserID("US.1"), Phone("1"), Phone("1")}, []channel.Identity{UserID("US.1"), Phone("1")}},
		"Mexico, old":              {[]channel.Identity{Phone("5215512345678")}, []channel.Identity{Phone("5215512345678"), Phone("525512345678")}},
		"Mexico, new":              {[]channel.Identity{Phone("525512345678")}, []channel.Identity{Phone("525512345678"), Phone("5215512345678")}},
		"Brazil, old":              {[]channel.Identity{Phone("551187654321")}, []channel.Identity{Phone("551187654321"), Phone("5511987654321")}},
		"Brazil, new":              {[]channel.Identity{Phone("5511987654321")}, []channel.Identity{Phone("5511987654321"), Phone("551187654321")}},
		"Brazil, not a mobile":     {[]channel.Identity{Phone("551132654321")}, []channel.Identity{Phone("551132654321")}},
		"Brazil, no such mobile":   {[]channel.Identity{Phone("5511932654321")}, []channel.Identity{Phone("5511932654321")}},
		"behind all that was said": {[]channel.Identity{UserID("MX.1"), Phone("525512345678"), Phone("16505550123")},
			[]channel.Identity{UserID("MX.1"), Phone("525512345678"), Phone("16505550123"), Phone("5215512345678")}},
		"another country":         {[]channel.Identity{Phone("385919998888")}, []channel.Identity{Phone("385919998888")}},
		"a user id is no number":  {[]channel.Identity{UserID("525512345678")}, []channel.Identity{UserID("525512345678")}},
		"text is no number":       {[]channel.Identity{Phone("52551234567x")}, []channel.Identity{Phone("52551234567x")}},
		"a number that is no one": {[]channel.Identity{Phone("52")}, []channel.Identity{Phone("52")}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got []channel.Identity
			if p := Participant(tt.given...); p != nil {
				got = p.Identities
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// Either spelling finds the other, whichever came first.
func FuzzOtherSpelling(f *testing.F) {
	for _, s := range []string{"525512345678", "5215512345678", "551187654321", "5511987654321", "", "55119", "5511999999999"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, number string) {
		if other := otherSpelling(number); other != "" && (other == number || otherSpelling(other) != number) {
			t.Errorf("%q is %q, and that is %q", number, other, otherSpelling(other))
		}
	})
}

func TestBatchIsBounded(t *testing.T) {
	t.Parallel()
	read := func(items int) (channel.Inbound, error) {
		b := Batch{Now: time.Unix(1_796_016_600, 0)}
		return b.Read([]byte(`{"items":[`+strings.TrimSuffix(strings.Repeat(`{},`, items), ",")+`]}`), func(root map[string]any) {
			b.Objects(root, "items", "", func(map[string]any, string) { b.Ignore("item", "", "is a test") })
		})
	}
	if in, err := read(maxItems); err != nil || len(in.Ignored) != maxItems {
		t.Errorf("%d items: %d and %v", maxItems, len(in.Ignored), err)
	}
	var unreadable *channel.ParseError
	if _, err := read(maxItems + 1); !errors.As(err, &unreadable) {
		t.Errorf("one more: %v", err)
	}
}

func TestAt(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_796_016_600, 0).UTC()
	b := Batch{Now: now}
	for _, tt := range []struct{ at, want time.Time }{
		{now.Add(-time.Hour).In(time.FixedZone("", 3600)), now.Add(-time.Hour)}, {now, now},
		{now.Add(time.Second), now}, {time.Time{}, now}, {time.Unix(0, 0), now},
	} {
		if got := b.At(tt.at); got != tt.want {
			t.Errorf("At(%v) = %v, want %v", tt.at, got, tt.want)
		}
	}
}

func TestDeliveryID(t *testing.T) {
	t.Parallel()
	const id = "01930000-0000-7000-8000-000000000009"
	for carried, want := range map[string]string{id: id, "dlv_" + id: id, "dlv_01J9ZK2A": "", "": ""} {
		got := ""
		if p := DeliveryID(carried); p != nil {
			got = p.String()
		}
		if got != want {
			t.Errorf("%q: %q, want %q", carried, got, want)
		}
	}
}

// Whatever stands in them, attachments stay below the 4 KiB that an activity takes.
func TestAttachmentsAreSmall(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("\"\u2028é", 4000)
	place := map[string]any{"latitude": json.Number("1"), "longitude": json.Number("2"), "name": long, "address": long, "url": long}
	var list []any
	for range 100 {
		list = append(list, map[string]any{"name": map[string]any{"n": long}, "phones": []any{map[string]any{"phone": "+1"}, map[string]any{"w": fmt.Sprint(2)}}})
	}
	for name, attachment := range map[string]map[string]any{
		"location": Location(place),
		"contacts": Contacts(map[string]any{"contacts": list}, CardNames{FormattedName: "n", WhatsAppID: "w"}),
	} {
		raw := Attach(attachment)
		if len(raw) != 1 || len(raw[0]) > 4<<10 || len(raw[0]) < 500 {
			t.Errorf("%s: %d attachments, the first of %d bytes", name, len(raw), len(raw[0]))
		}
	}
	if got := Bounded(map[string]any{"a": long}); jsonSize(got) > maxRaw {
		t.Errorf("a large part keeps %d bytes", jsonSize(got))
	}
}
