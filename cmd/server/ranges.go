package main

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"converger/internal/fault"
	"converger/internal/tenants"
)

type rangesCmd struct {
	List   rangesListCmd   `cmd:"" help:"List the address ranges that are refused, or not counted."`
	Show   rangesShowCmd   `cmd:"" help:"Show one."`
	Add    rangesAddCmd    `cmd:"" help:"Deny a range of addresses, or exempt it."`
	Update rangesUpdateCmd `cmd:"" help:"Change what a range is for, its note or its end."`
	Remove rangesRemoveCmd `cmd:"" help:"Remove a range."`
}

var rangeColumns = []column{{"RANGE", "cidr"}, {"KIND", "kind"}, {"EXPIRES", "expires_at"}, {"NOTE", "note"}, {"SINCE", "inserted_at"}, {"ID", "id"}}

type rangesListCmd struct {
	managementFlags
	Kind    *string `help:"Only deny, or only exempt." enum:"deny,exempt" placeholder:"KIND"`
	Address string  `help:"Only ranges that this address is in; the one with the longest prefix decides." placeholder:"ADDRESS"`
	Limit   int     `help:"Most to show; 0: all." default:"50"`
}

func (c rangesListCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	found, more, err := h.list("/address_ranges", filter(map[string]string{"kind": given(c.Kind), "address": c.Address}), c.Limit)
	if err != nil {
		return err
	}
	return h.showList(found, more, "No ranges match.", rangeColumns...)
}

type rangesAddCmd struct {
	managementFlags
	Kind    string        `arg:"" help:"deny: refused everywhere; exempt: not counted by limits on addresses." enum:"deny,exempt"`
	CIDR    string        `arg:"" name:"range" help:"The range in CIDR notation, or one address."`
	Note    string        `help:"Why, for whoever finds it later." placeholder:"TEXT"`
	Expires time.Duration `help:"How long it stands, such as 24h; without it for ever." placeholder:"DURATION"`
	Force   bool          `help:"Also when it has every address in it, or your own."`
}

// Help shows examples.
func (rangesAddCmd) Help() string {
	return `Of several ranges that have an address in them the one with the longest prefix decides.

Examples:

    server ranges add deny 203.0.113.0/24 --expires 24h --note "credential stuffing"
    server ranges add exempt 198.51.100.7 --note "office of Acme"`
}

func (c rangesAddCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	r, err := h.do(http.MethodPost, "/address_ranges", members{"cidr": c.CIDR, "kind": c.Kind, "note": c.Note, "expires_at": expiry(c.Expires), "force": c.Force})
	if err != nil {
		return err
	}
	return h.done(r, "Range %s (%s %s) is in force on every node within a second.", cell(r, "id"), cell(r, "kind"), cell(r, "cidr"))
}

// rangeArg names a range.
type rangeArg struct {
	managementFlags
	Range string `arg:"" help:"Id of the range, or the range itself, see ranges list."`
}

// connect finds the hub, and where it keeps the range.
func (a rangeArg) connect(e *env) (h *hubClient, path string, err error) {
	id := isID(a.Range)
	wanted, err := tenants.ParseRange("", a.Range)
	if bad := (*fault.Invalid)(nil); !id && errors.As(err, &bad) {
		return nil, "", misused(fmt.Sprintf("the range %q is no id, and as a range %s", a.Range, bad.Fields[0].Detail))
	}
	if h, err = a.managementFlags.connect(e); err != nil {
		return nil, "", err
	}
	if id {
		return h, "/address_ranges/" + a.Range, nil
	}
	found, _, err := h.list("/address_ranges", url.Values{"address": {wanted.Addr().String()}}, 0)
	if err != nil {
		return nil, "", err
	}
	for _, r := range found {
		if cell(r, "cidr") == wanted.String() {
			return h, "/address_ranges/" + url.PathEscape(cell(r, "id")), nil
		}
	}
	return nil, "", fmt.Errorf("there is no range %s; `server ranges list` shows them", a.Range)
}

type rangesShowCmd struct{ rangeArg }

func (c rangesShowCmd) Run(e *env) error {
	h, path, err := c.connect(e)
	if err != nil {
		return err
	}
	r, err := h.get(path)
	if err != nil {
		return err
	}
	return h.show(r, rangeColumns...)
}

type rangesUpdateCmd struct {
	rangeArg
	guard
	Kind    *string        `help:"deny (refused everywhere) or exempt (not counted by limits on addresses)." enum:"deny,exempt" placeholder:"KIND"`
	Note    *string        `help:"Why, for whoever finds it later." placeholder:"TEXT"`
	Expires *time.Duration `help:"How long it stands from now, such as 24h; 0s for ever." placeholder:"DURATION"`
	Force   bool           `help:"Also when it then denies your own address."`
}

func (c rangesUpdateCmd) Run(e *env) error {
	change := members{}
	if c.Kind != nil {
		change["kind"] = *c.Kind
	}
	if c.Note != nil {
		change["note"] = *c.Note
	}
	if c.Expires != nil {
		change["expires_at"] = expiry(*c.Expires)
	}
	if len(change) == 0 {
		return errNoChange
	}
	change["force"] = c.Force
	h, path, err := c.connect(e)
	if err != nil {
		return err
	}
	r, err := h.do(http.MethodPatch, path, change)
	if err != nil {
		return err
	}
	return h.show(r, rangeColumns...)
}

type rangesRemoveCmd struct {
	rangeArg
	guard
	Force bool `help:"Also when a wider range then denies your own address."`
}

func (c rangesRemoveCmd) Run(e *env) error {
	h, path, err := c.connect(e)
	if err != nil {
		return err
	}
	query := url.Values{}
	if c.Force {
		query.Set("force", "true")
	}
	if err := h.remove(path, query); err != nil {
		return err
	}
	return h.done(nil, "Removed %s.", c.Range)
}
