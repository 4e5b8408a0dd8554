package delivery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/channel"
	"converger/internal/fault"
	"converger/internal/postgres"
	"converger/internal/tenants"
)

// Failures of [Rules], beside *fault.Invalid.
var (
	// ErrRuleNotFound says that the tenant has no such routing rule.
	ErrRuleNotFound = errors.New("delivery: no such routing rule")
	// ErrTooManyRules says that the tenant has MaxRules routing rules already.
	ErrTooManyRules = errors.New("delivery: too many routing rules")
)

const (
	// MaxRules is how many routing rules a tenant may have: as many as the list shows.
	MaxRules = 1000
	// MaxRuleTargets is how many channels a routing rule may name as targets.
	MaxRuleTargets = 20

	maxRuleName = 200 // characters, as the migration checks
)

// RoutingRule copies every activity of one channel's conversations to other channels of the tenant; see
// [Service.Targets] for what they get. The enabled rules of a tenant form no cycle, counting those from living channels.
//
// A rule outlives its channels: a target that was deleted stays listed and gets nothing, and so does the rule of a deleted
// source, until somebody gives it other channels or deletes it.
type RoutingRule struct {
	TenantID         tenants.ID
	ID               uuid.UUID
	Name             string // unique among the tenant's rules
	SourceChannelID  uuid.UUID
	TargetChannelIDs []uuid.UUID // 1 to MaxRuleTargets, each once, without the source
	Enabled          bool
	Version          int64 // configuration version of the last change
	InsertedAt       time.Time
	UpdatedAt        time.Time
}

// NewRoutingRule is the input of [Rules.Create].
type NewRoutingRule struct {
	Name             string // 1 to 200 characters, none of them a control character
	SourceChannelID  uuid.UUID
	TargetChannelIDs []uuid.UUID // a channel that is named twice counts once
	Enabled          *bool       // nil: true
}

// RoutingRulePatch is a change; nil members stay as they are.
type RoutingRulePatch struct {
	Name             *string
	SourceChannelID  *uuid.UUID
	TargetChannelIDs []uuid.UUID
	Enabled          *bool
}

// Rules keeps routing rules. It is safe for concurrent use. Each change is one transaction with its audit record that
// holds the configuration row (see [tenants.BumpTx]): rules and channels stand still while a change is checked, so two
// changes at once can't make together what each alone may not, such as a cycle. Changes that take expected versions are made
// only to a rule that has one of them, else they return [tenants.ErrChanged]; with none given, to whatever the rule is.
//
// Beside the errors named at each method, every method returns the database's own, wrapped.
type Rules struct {
	pool     *pgxpool.Pool
	registry *channel.Registry
}

// NewRules makes the store. registry tells which channel types send.
func NewRules(pool *pgxpool.Pool, registry *channel.Registry) *Rules {
	return &Rules{pool: pool, registry: registry}
}

const (
	ruleColumns = `tenant_id, id, name, source_channel_id, target_channel_ids, enabled, version, inserted_at, updated_at`

	insertRuleQuery = `
INSERT INTO routing_rules (tenant_id, id, name, source_channel_id, target_channel_ids, enabled, version)
VALUES ($1, $2, $3, $4, $5, $6, $7) RETURNING ` + ruleColumns
	getRuleQuery   = `SELECT ` + ruleColumns + ` FROM routing_rules WHERE tenant_id = $1 AND id = $2 AND deleted_at IS NULL`
	listRulesQuery = `SELECT ` + ruleColumns + ` FROM routing_rules
WHERE tenant_id = $1 AND deleted_at IS NULL ORDER BY name LIMIT $2`
	countRulesQuery = `SELECT count(*) FROM routing_rules WHERE tenant_id = $1 AND deleted_at IS NULL`
	updateRuleQuery = `
UPDATE routing_rules SET name = $3, source_channel_id = $4, target_channel_ids = $5, enabled = $6, version = $7, updated_at = now()
WHERE tenant_id = $1 AND id = $2 AND deleted_at IS NULL RETURNING ` + ruleColumns
	deleteRuleQuery = `
UPDATE routing_rules SET deleted_at = now(), version = $3, updated_at = now()
WHERE tenant_id = $1 AND id = $2 AND deleted_at IS NULL`

	ruleChannelsQuery = `SELECT id, name, type, mode FROM channels WHERE tenant_id = $1 AND id = ANY ($2) AND deleted_at IS NULL`
	// What a deleted channel once led to closes no circle: it never comes back.
	ruleEdgesQuery = `
SELECT r.source_channel_id, r.target_channel_ids
FROM routing_rules r JOIN channels c ON c.tenant_id = r.tenant_id AND c.id = r.source_channel_id
WHERE r.tenant_id = $1 AND r.id <> $2 AND r.enabled AND r.deleted_at IS NULL AND c.deleted_at IS NULL`
)

// Create makes a rule. Errors: *fault.Invalid, ErrTooManyRules.
func (s *Rules) Create(ctx context.Context, by tenants.Actor, tenant tenants.ID, in NewRoutingRule) (RoutingRule, error) {
	r := RoutingRule{TenantID: tenant, ID: newID(), Name: in.Name, SourceChannelID: in.SourceChannelID,
		TargetChannelIDs: distinct(in.TargetChannelIDs), Enabled: in.Enabled == nil || *in.Enabled}
	if err := r.check(); err != nil {
		return RoutingRule{}, err
	}
	err := s.change(ctx, "create routing rule", func(tx pgx.Tx, version int64) error {
		var have int
		if err := tx.QueryRow(ctx, countRulesQuery, tenant).Scan(&have); err != nil {
			return err
		}
		if have >= MaxRules {
			return ErrTooManyRules
		}
		if err := s.checkChannelsTx(ctx, tx, &r); err != nil {
			return err
		}
		if err := checkCycleTx(ctx, tx, &r); err != nil {
			return err
		}
		made, err := oneRule(ctx, tx, insertRuleQuery, tenant, r.ID, r.Name, r.SourceChannelID, r.TargetChannelIDs, r.Enabled, version)
		if err != nil {
			return err
		}
		r = made
		return auditRuleTx(ctx, tx, by, "create", nil, &r)
	})
	if err != nil {
		return RoutingRule{}, err
	}
	return r, nil
}

// Get returns one rule, or ErrRuleNotFound.
func (s *Rules) Get(ctx context.Context, tenant tenants.ID, id uuid.UUID) (RoutingRule, error) {
	r, err := oneRule(ctx, s.pool, getRuleQuery, tenant, id)
	if err != nil {
		return RoutingRule{}, fmt.Errorf("get routing rule: %w", err)
	}
	return r, nil
}

// List returns the tenant's rules by name, at most MaxRules.
func (s *Rules) List(ctx context.Context, tenant tenants.ID) ([]RoutingRule, error) {
	rows, _ := s.pool.Query(ctx, listRulesQuery, tenant, MaxRules) // the error is CollectRows' too
	list, err := pgx.CollectRows(rows, scanRule)
	if err != nil {
		return nil, fmt.Errorf("list routing rules: %w", err)
	}
	return list, nil
}

// Update changes a rule; a change that changes nothing writes nothing. Channels are checked when they are changed, and for a
// cycle also when the rule is switched on; so a rule that names a deleted channel can still be renamed and switched off.
// Errors: *fault.Invalid, ErrRuleNotFound, tenants.ErrChanged.
func (s *Rules) Update(ctx context.Context, by tenants.Actor, tenant tenants.ID, id uuid.UUID, patch RoutingRulePatch, expected ...int64) (RoutingRule, error) {
	var r RoutingRule
	err := s.change(ctx, "update routing rule", func(tx pgx.Tx, version int64) error {
		before, err := expectRuleTx(ctx, tx, tenant, id, expected)
		if err != nil {
			return err
		}
		r = before
		r.apply(patch)
		rewired := r.SourceChannelID != before.SourceChannelID || !slices.Equal(r.TargetChannelIDs, before.TargetChannelIDs)
		renamed, toggled := r.Name != before.Name, r.Enabled != before.Enabled
		if !rewired && !renamed && !toggled {
			return errUnchanged
		}
		if err := r.check(); err != nil {
			return err
		}
		if rewired {
			if err := s.checkChannelsTx(ctx, tx, &r); err != nil {
				return err
			}
		}
		if rewired || toggled {
			if err := checkCycleTx(ctx, tx, &r); err != nil {
				return err
			}
		}
		r, err = oneRule(ctx, tx, updateRuleQuery, tenant, id, r.Name, r.SourceChannelID, r.TargetChannelIDs, r.Enabled, version)
		if err != nil {
			return err
		}
		action := "update"
		if !rewired && !renamed {
			action = "toggle_enabled"
		}
		return auditRuleTx(ctx, tx, by, action, &before, &r)
	})
	if err != nil {
		return RoutingRule{}, err
	}
	return r, nil
}

// Delete takes a rule away; its name is free again. Errors: ErrRuleNotFound, also for a second time, and tenants.ErrChanged.
func (s *Rules) Delete(ctx context.Context, by tenants.Actor, tenant tenants.ID, id uuid.UUID, expected ...int64) error {
	return s.change(ctx, "delete routing rule", func(tx pgx.Tx, version int64) error {
		before, err := expectRuleTx(ctx, tx, tenant, id, expected)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, deleteRuleQuery, tenant, id, version); err != nil {
			return err
		}
		return auditRuleTx(ctx, tx, by, "delete", &before, nil)
	})
}

// expectRuleTx reads a rule that is to be changed, if it has one of the expected versions. The configuration row, which the
// caller holds, keeps it as it is.
func expectRuleTx(ctx context.Context, tx pgx.Tx, tenant tenants.ID, id uuid.UUID, expected []int64) (RoutingRule, error) {
	r, err := oneRule(ctx, tx, getRuleQuery, tenant, id)
	if err != nil {
		return RoutingRule{}, err
	}
	return r, tenants.CheckVersion(r.Version, expected)
}

// errUnchanged ends a change that finds everything as wanted: nothing is written, and no node reloads.
var errUnchanged = errors.New("unchanged")

// change runs fn in a transaction that holds the configuration row.
func (s *Rules) change(ctx context.Context, what string, fn func(tx pgx.Tx, version int64) error) error {
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		version, err := tenants.BumpTx(ctx, tx)
		if err != nil {
			return err
		}
		return fn(tx, version)
	})
	if err != nil && !errors.Is(err, errUnchanged) {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// oneRule runs a query that gives the one rule it is about.
func oneRule(ctx context.Context, q postgres.Querier, sql string, args ...any) (RoutingRule, error) {
	rows, _ := q.Query(ctx, sql, args...) // the error is CollectExactlyOneRow's too
	r, err := pgx.CollectExactlyOneRow(rows, scanRule)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return RoutingRule{}, ErrRuleNotFound
	case postgres.Constraint(err) == "routing_rules_name_key":
		return RoutingRule{}, fault.Invalidf("/name", fault.Conflict, "has already been taken")
	}
	return r, err
}

func scanRule(row pgx.CollectableRow) (r RoutingRule, err error) {
	err = row.Scan(&r.TenantID, &r.ID, &r.Name, &r.SourceChannelID, &r.TargetChannelIDs, &r.Enabled, &r.Version, &r.InsertedAt, &r.UpdatedAt)
	return r, err
}

func auditRuleTx(ctx context.Context, tx pgx.Tx, by tenants.Actor, action string, before, after *RoutingRule) error {
	entry := tenants.Entry{Action: action, ResourceType: "routing_rule"}
	// A nil *RoutingRule would be a non-nil any.
	if before != nil {
		entry.TenantID, entry.ResourceID, entry.Before = &before.TenantID, before.ID.String(), before.snapshot()
	}
	if after != nil {
		entry.TenantID, entry.ResourceID, entry.After = &after.TenantID, after.ID.String(), after.snapshot()
	}
	return tenants.AuditTx(ctx, tx, by, entry)
}

// snapshot is a rule as the audit log keeps it.
func (r *RoutingRule) snapshot() map[string]any {
	return map[string]any{"name": r.Name, "source_channel_id": r.SourceChannelID, "target_channel_ids": r.TargetChannelIDs, "enabled": r.Enabled}
}

func (r *RoutingRule) apply(p RoutingRulePatch) {
	if p.Name != nil {
		r.Name = *p.Name
	}
	if p.SourceChannelID != nil {
		r.SourceChannelID = *p.SourceChannelID
	}
	if p.TargetChannelIDs != nil {
		r.TargetChannelIDs = distinct(p.TargetChannelIDs)
	}
	if p.Enabled != nil {
		r.Enabled = *p.Enabled
	}
}

// check returns what is wrong with the rule by itself.
func (r *RoutingRule) check() error {
	var bad fault.Invalid
	switch name := r.Name; {
	case strings.TrimSpace(name) == "":
		bad.Addf("/name", fault.Required, "is required")
	case !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl) || strings.TrimSpace(name) != name:
		bad.Addf("/name", fault.Malformed, "must not begin or end with a blank or hold control characters")
	case utf8.RuneCountInString(name) > maxRuleName:
		bad.Addf("/name", fault.TooLong, "must be at most %d characters", maxRuleName)
	}
	if r.SourceChannelID == uuid.Nil {
		bad.Addf("/source_channel_id", fault.Required, "is required")
	}
	switch targets := r.TargetChannelIDs; {
	case len(targets) == 0:
		bad.Addf("/target_channel_ids", fault.Required, "is required: name 1 to %d channels", MaxRuleTargets)
	case len(targets) > MaxRuleTargets:
		bad.Addf("/target_channel_ids", fault.TooLong, "must name at most %d channels", MaxRuleTargets)
	case slices.Contains(targets, r.SourceChannelID):
		bad.Addf("/target_channel_ids", fault.Conflict, "cannot include the source channel")
	}
	return bad.Err()
}

// checkChannelsTx refuses channels that the tenant does not have (those of others look the same) or that can't take their
// part. What is true now may change later; Targets asks again.
func (s *Rules) checkChannelsTx(ctx context.Context, tx pgx.Tx, r *RoutingRule) error {
	type found struct {
		ID   uuid.UUID
		Name string
		Type channel.Type
		Mode channel.Mode
	}
	rows, _ := tx.Query(ctx, ruleChannelsQuery, r.TenantID, append(slices.Clone(r.TargetChannelIDs), r.SourceChannelID))
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[found])
	if err != nil {
		return err
	}
	byID := make(map[uuid.UUID]found, len(list))
	for _, ch := range list {
		byID[ch.ID] = ch
	}

	var bad fault.Invalid
	if source, ok := byID[r.SourceChannelID]; !ok {
		bad.Addf("/source_channel_id", fault.NotFound, "all channels must belong to the same tenant")
	} else if !source.Mode.Receives() {
		bad.Addf("/source_channel_id", fault.Conflict, "source channel is outbound-only and cannot receive inbound messages")
	}
	var missing bool
	var deaf []string
	for _, id := range r.TargetChannelIDs {
		target, ok := byID[id]
		if !ok {
			missing = true
		} else if _, sends := senderOf(s.registry, target.Type); !sends || !target.Mode.Sends() {
			deaf = append(deaf, target.Name)
		}
	}
	if missing {
		bad.Addf("/target_channel_ids", fault.NotFound, "all channels must belong to the same tenant")
	}
	if len(deaf) > 0 {
		bad.Addf("/target_channel_ids", fault.Conflict, "these target channels are inbound-only and cannot deliver outbound: %s", strings.Join(deaf, ", "))
	}
	return bad.Err()
}

// checkCycleTx refuses an enabled rule that would close a circle of enabled rules.
func checkCycleTx(ctx context.Context, tx pgx.Tx, r *RoutingRule) error {
	if !r.Enabled {
		return nil
	}
	type edge struct {
		Source  uuid.UUID
		Targets []uuid.UUID
	}
	rows, _ := tx.Query(ctx, ruleEdgesQuery, r.TenantID, r.ID)
	edges, err := pgx.CollectRows(rows, pgx.RowToStructByPos[edge])
	if err != nil {
		return err
	}
	leads := make(map[uuid.UUID][]uuid.UUID, len(edges))
	for _, e := range edges {
		leads[e.Source] = append(leads[e.Source], e.Targets...)
	}
	if reaches(leads, r.TargetChannelIDs, r.SourceChannelID) {
		return fault.Invalidf("/target_channel_ids", fault.Conflict, "would create a routing cycle")
	}
	return nil
}

// reaches reports whether a walk along leads, from any of the channels in from, comes to the channel to.
func reaches(leads map[uuid.UUID][]uuid.UUID, from []uuid.UUID, to uuid.UUID) bool {
	seen := make(map[uuid.UUID]struct{})
	for queue := slices.Clone(from); len(queue) > 0; queue = queue[1:] {
		at := queue[0]
		if at == to {
			return true
		}
		if _, again := seen[at]; !again {
			seen[at] = struct{}{}
			queue = append(queue, leads[at]...)
		}
	}
	return false
}

// distinct copies ids without repeats, in their order.
func distinct(ids []uuid.UUID) []uuid.UUID {
	out := make([]uuid.UUID, 0, min(len(ids), MaxRuleTargets+1))
	seen := make(map[uuid.UUID]struct{}, len(ids))
	for _, id := range ids {
		if _, twice := seen[id]; !twice {
			seen[id] = struct{}{}
			out = append(out, id)
		}
	}
	return out
}
