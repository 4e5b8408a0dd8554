package http

import (
	"net/http"

	"converger/internal/ratelimit"
	"converger/internal/tenants"
)

const managementPrefix = "/api/v1/management"

// registerManagementRoutes: for operators and their programs, across tenants. Members that are not known are refused: a
// mistyped setting must not look as if it had been saved.
func (s *server) registerManagementRoutes() {
	s.registerTenantRoutes()
	s.registerKeyRoutes()
	s.registerLimitRoutes()
	s.registerUploadTypeRoutes()
	s.registerChannelRoutes()
	s.registerOperatorRoutingRoutes()
	s.registerEventRoutes()
	s.registerOperatorMessageRoutes()
	s.registerUserRoutes()
	s.registerAuditRoutes()
	s.registerOperatorTokenRoutes()
	s.registerRangeRoutes()
	s.registerRateLimitRoutes()
}

// operatorRoute adds a row of the management API: reading takes the scope read, everything else write.
func (s *server) operatorRoute(method, pattern string, body bodyKind, handle func(*call) (*reply, error)) {
	scope := tenants.ScopeWrite
	if method == http.MethodGet {
		scope = tenants.ScopeRead
	}
	s.register(route{
		method: method, pattern: managementPrefix + pattern, auth: credentialOperator, scope: scope, bucket: ratelimit.Management,
		body: body, handle: handle,
	})
}

// changed makes a change of configuration be in force on this node before its answer is sent. The change is committed: if
// this fails, the next poll brings it.
func (s *server) changed(c *call) {
	if err := s.Directory.Refresh(c.ctx()); err != nil {
		s.Logger.WarnContext(c.ctx(), "a change is stored but not yet in force on this node", "request_id", c.id, "error", err.Error())
	}
}
